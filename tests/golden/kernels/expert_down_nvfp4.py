"""y [B, 2048] = the 6 chosen experts' products, weighted and summed, plus the shared expert's.

Ops:
  expert_linear: FP32 accumulate, expert scale on the accumulator, then `out`
  combine: bf16 of the FP32 sum in rank order
  linear: FP32 accumulate, tensor scale on the accumulator, then `out`
  sum: bf16(a + b)

Bound: N=2048, K=512, TILE=16, SPLIT=4, CHAINS=4, STEPS=1, EVEN=True, RANKS=6, COLUMNS=8, SHARED_K=1024, SHARED_STEPS=2,
  SHARED_EVEN=True
"""

import triton
import triton.language as tl


INTERPRET: tl.constexpr = tl.constexpr(False)


SUM_UNIT: tl.constexpr = tl.constexpr(128.0)


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a @ b for BF16 a and b (two- or three-dimensional), FP32 accumulate."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def load_packed(
    codes_ptr,
    scales_ptr,
    groups,
    rows,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tile of the NVFP4 matrix [``rows``, K], from column ``k`` on: words of codes, and pairs of scale bytes.

    Codes are int32 [STEPS, ROWS / 8, SPLIT, 32 lanes, 4], scales int16 [STEPS, ROWS / 8, SPLIT, 32 lanes].
    """
    step = tl.arange(0, STEPS)[:, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, :, None]
    lane = tl.arange(0, 32)[None, None, None, :]
    row = groups[None, :, None, None] + lane // 4
    # In units of the 32 columns of a lane, since all 16 bytes of codes and both scales lie within K or outside.
    block = k // 32 + (step * SPLIT + split) * 4 + lane % 4
    # Four lanes' scales lie side by side; told so, the compiler would let one lane load them for the others.
    at = tl.max_contiguous(row * (K // 32) + block, (1, 1, 1, 1))
    words = at[:, :, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32))
    scales_ptr = scales_ptr.to(tl.pointer_type(tl.int16))
    if EVEN:
        return tl.load(codes_ptr + words), tl.load(scales_ptr + at)
    else:
        inside = (row < rows) & (block < K // 32)
        codes = tl.load(codes_ptr + words, mask=inside[:, :, :, :, None], other=0)
        return codes, tl.load(scales_ptr + at, mask=inside, other=0)


@triton.jit
def load_vectors_of_words(
    x_ptr,
    first,
    count,
    k,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Part of the BF16 vectors [``count``, K] at ``x_ptr``, from column ``k`` of K on, in the order of packed weights.

    It is [CHAINS * SPLIT, STEPS * 128 / CHAINS, COLUMNS]: the vectors in columns from ``first`` on, zeros elsewhere.
    """
    step = tl.arange(0, STEPS)[:, None, None, None, None, None]
    eight = tl.arange(0, COLUMNS // 8)[None, :, None, None, None, None]
    word = tl.arange(0, 4)[None, None, :, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, None, :, None, None]
    lane = tl.arange(0, 32)[None, None, None, None, :, None]
    vector = eight * 8 + lane // 4
    column = k + ((step * SPLIT + split) * 4 + lane % 4) * 32 + word * 8
    column += tl.arange(0, 8)[None, None, None, None, None, :]
    live = (vector >= first) & (vector < first + count)
    if not EVEN:
        live = live & (column < K)
    x = tl.load(x_ptr + (vector - first) * K + column, mask=live, other=0.0)
    # Axes: step, eight, chain, its words, split, vector of eight, lane of four, pair, instruction, half of K.
    x = tl.reshape(x, (STEPS, COLUMNS // 8, CHAINS, 4 // CHAINS, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (2, 4, 0, 3, 8, 6, 9, 7, 1, 5))
    return tl.reshape(x, (CHAINS * SPLIT, STEPS * 128 // CHAINS, COLUMNS))


@triton.jit
def scale_values(scales):
    """Both E4M3 scales of an int16 pair of bytes, times 2^119: BF16, exact.

    The bits read as BF16 are scale * 2^-120, subnormals included.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 s, up;
            prmt.b32 s, $2, 0, 0x4140;
            and.b32 s, s, 0x007f007f;
            shl.b32 s, s, 4;
            mov.b32 up, 0x7b807b80;
            mul.rn.bf16x2 s, s, up;
            mov.b32 up, 0x7b007b00;
            mul.rn.bf16x2 s, s, up;
            mov.b32 {$0, $1}, s;
        }""",
        "=h,=h,r",
        [scales.to(tl.int32)],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def word_values(words, scales):
    """The eight codes of each int32 word times their scale: BF16 in pairs (0, 4), (1, 5), (2, 6), (3, 7), exact."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 s, a, b;
            mov.b32 s, {$9, $9};
            shl.b32 a, $8, 12;
            shl.b32 b, $8, 6;
            and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01c001c0;
            or.b32 a, a, b;
            mul.rn.bf16x2 a, a, s;
            mov.b32 {$0, $1}, a;
            shl.b32 a, $8, 8;
            shl.b32 b, $8, 2;
            and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01c001c0;
            or.b32 a, a, b;
            mul.rn.bf16x2 a, a, s;
            mov.b32 {$2, $3}, a;
            shl.b32 a, $8, 4;
            shr.b32 b, $8, 2;
            and.b32 a, a, 0x80008000;
            and.b32 b, b, 0x01c001c0;
            or.b32 a, a, b;
            mul.rn.bf16x2 a, a, s;
            mov.b32 {$4, $5}, a;
            shr.b32 b, $8, 6;
            and.b32 a, $8, 0x80008000;
            and.b32 b, b, 0x01c001c0;
            or.b32 a, a, b;
            mul.rn.bf16x2 a, a, s;
            mov.b32 {$6, $7}, a;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
        [words, scales],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def dequantise(codes, scales):
    """A tile as loaded -> code * block scale / SUM_UNIT, exact: BF16 [STEPS, ROWS / 8, SPLIT, 32, 4, 2, 2, 2].

    The last axes are those of a word's eight codes: instruction, half of its K, pair. FP32 in the interpreter.
    """
    pairs: tl.constexpr = (codes.shape[0], codes.shape[1], codes.shape[2], 32, 2, 2)
    if INTERPRET:
        # The same moves of bits in FP32: the interpreter has no assembly, and flushes BF16 subnormals to zero.
        bytes = tl.join(scales, scales >> 8).to(tl.int32) & 0x7F
        scale = (bytes << 20).to(tl.float32, bitcast=True) * 2.0**113
        scale = tl.reshape(tl.broadcast_to(scale[:, :, :, :, :, None], pairs), codes.shape)
        code = codes[:, :, :, :, :, None] >> (4 * tl.arange(0, 8))[None, None, None, None, None, :]
        value = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
        value = tl.reshape(
            value * scale[:, :, :, :, :, None], (codes.shape[0], codes.shape[1], codes.shape[2], 32, 4, 2, 2, 2)
        )
        # Code 4p + 2m + q is number p of a pair.
        return tl.permute(value, (0, 1, 2, 3, 4, 6, 7, 5))
    else:
        low, high = scale_values(scales)
        scale = tl.join(low, high)[:, :, :, :, :, None]
        scale = tl.reshape(tl.broadcast_to(scale, pairs), codes.shape)
        c0, c4, c1, c5, c2, c6, c3, c7 = word_values(codes, scale)
        low_halves = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        high_halves = tl.join(tl.join(c4, c6), tl.join(c5, c7))
        return tl.join(low_halves, high_halves)


@triton.jit
def packed_operand(tile, CHAINS: tl.constexpr):
    """A tile as loaded -> the operand [CHAINS * SPLIT, ROWS, STEPS * 128 / CHAINS]."""
    codes, scales = tile
    STEPS: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1]
    SPLIT: tl.constexpr = codes.shape[2]
    # Axes: step, group, split, row of eight, lane of four, chain, its words, instruction, half of K, pair.
    weights = tl.reshape(dequantise(codes, scales), (STEPS, GROUPS, SPLIT, 8, 4, CHAINS, 4 // CHAINS, 2, 2, 2))
    weights = tl.permute(weights, (5, 2, 1, 3, 0, 6, 7, 4, 8, 9))
    return tl.reshape(weights, (CHAINS * SPLIT, GROUPS * 8, STEPS * 128 // CHAINS))


@triton.jit
def accumulate_packed(
    acc,
    tile,
    codes_ptr,
    scales_ptr,
    groups,
    rows,
    x_ptr,
    first,
    count,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """acc + weight rows x vectors over all of K, in SUM_UNIT: FP32 [CHAINS * SPLIT, ROWS, COLUMNS], see accumulate."""
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    for k in tl.static_range(0, K, SPLIT * STEPS * 128):
        x = load_vectors_of_words(x_ptr, first, count, k, K, acc.shape[2], SPLIT, CHAINS, STEPS, EVEN)
        weights = packed_operand(tile, CHAINS)
        ahead = k + SPLIT * STEPS * 128
        if ahead < K:
            tile = load_packed(codes_ptr, scales_ptr, groups, rows, ahead, K, SPLIT, STEPS, EVEN)
        acc = dot_bf16(weights, x, acc)
    return acc


@triton.jit
def column_of(y, column: tl.constexpr):
    """One column of y [ROWS, COLUMNS] (FP32)."""
    return tl.sum(tl.where(tl.arange(0, y.shape[1])[None, :] == column, y, 0.0), 1)


@triton.jit
def load_row_scales(scale_ptr, groups, rows):
    """FP32 scales of a tile's rows times SUM_UNIT, [ROWS, 1]; zero past ``rows``."""
    row = groups[:, None] + tl.arange(0, 8)[None, :]
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0) * SUM_UNIT
    return tl.reshape(scale, (groups.shape[0] * 8, 1))


@triton.jit
def release_dependents():
    """Let the next launch start. Publishes nothing: the next launch's wait does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def round_bf16(x):
    """FP32 -> BF16, to nearest, ties to even."""
    if INTERPRET:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Adding the rounding bias would carry a NaN's payload into the exponent of infinity.
        quiet = (bits >> 16) | 0x40
        half = tl.where(x == x, rounded, quiet)
        return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def row_groups(TILE: tl.constexpr):
    """First row of each group of eight of a tile: consecutive rows."""
    return tl.arange(0, TILE // 8) * 8


@triton.jit
def wait_for_producers():
    """Block until every launch before this one has finished and its stores are visible."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def expert_down_2048x512_nvfp4_shared(
    x_ptr,
    ids_ptr,
    mix_ptr,
    weight_codes_ptr,
    weight_scales_ptr,
    weight_scale_ptr,
    shared_x_ptr,
    shared_codes_ptr,
    shared_scales_ptr,
    shared_scale_ptr,
    y_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED_K: tl.constexpr,
    SHARED_STEPS: tl.constexpr,
    SHARED_EVEN: tl.constexpr,
):
    """y [B, 2048] = the 6 chosen experts' products, weighted and summed, plus the shared expert's."""
    release_dependents()
    first = tl.program_id(0) * TILE
    vector = tl.program_id(1)
    rows = N - first
    groups = row_groups(TILE)
    row = first + tl.arange(0, TILE)
    shared_codes = shared_codes_ptr + first.to(tl.int64) * (SHARED_K // 2)
    shared_scales = shared_scales_ptr + first.to(tl.int64) * (SHARED_K // 16)
    tile = load_packed(shared_codes, shared_scales, groups, rows, 0, SHARED_K, SPLIT, SHARED_STEPS, SHARED_EVEN)
    scale = load_row_scales(shared_scale_ptr + first, groups, rows)
    # Above: nothing that this step writes. Below: what its launches have made.
    wait_for_producers()
    if tl.load(ids_ptr + vector * RANKS) < 0:
        # A padded row has no expert at any rank. Nobody reads what becomes of it: it leaves at once.
        tl.store(y_ptr + vector * N + row, 0.0, mask=row < N)
        return
    # Each expert's product has a column: those of the ranks, then the shared one. One sum over the warps serves all.
    column = tl.arange(0, COLUMNS)[None, :]
    mix = tl.load(mix_ptr + vector * RANKS + column, mask=column < RANKS, other=0.0)
    acc = tl.zeros((CHAINS * SPLIT, TILE, COLUMNS), tl.float32)
    x = shared_x_ptr + vector * SHARED_K
    acc = accumulate_packed(
        acc, tile, shared_codes, shared_scales, groups, rows, x, RANKS, 1, SHARED_K, SPLIT, SHARED_STEPS, SHARED_EVEN
    )
    for rank in tl.static_range(RANKS):
        product = vector * RANKS + rank
        expert = tl.load(ids_ptr + product).to(tl.int64)
        weight_codes = weight_codes_ptr + (expert * N + first) * (K // 2)
        weight_scales = weight_scales_ptr + (expert * N + first) * (K // 16)
        tile = load_packed(weight_codes, weight_scales, groups, rows, 0, K, SPLIT, STEPS, EVEN)
        scale = tl.where(column == rank, load_row_scales(weight_scale_ptr + expert * N + first, groups, rows), scale)
        x = x_ptr + product * K
        acc = accumulate_packed(acc, tile, weight_codes, weight_scales, groups, rows, x, rank, 1, K, SPLIT, STEPS, EVEN)
    y = round_bf16(tl.sum(acc, 0) * scale).to(tl.float32)
    weighted = y * mix
    routed = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(RANKS):
        routed += column_of(weighted, rank)
    total = round_bf16(routed)
    total = round_bf16(total.to(tl.float32) + column_of(y, RANKS))
    tl.store(y_ptr + vector * N + row, total, mask=row < N)
