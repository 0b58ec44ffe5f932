"""y [B, 2048] = the 6 chosen experts' products, weighted and summed, plus the shared expert's.

Ops:
  expert_linear: FP32 accumulate, expert scale on the accumulator, then `out`
  combine: bf16 of the FP32 sum in rank order
  linear: FP32 accumulate, tensor scale on the accumulator, then `out`
  sum: bf16(a + b)

Bound: N=2048, K=512, TILE=16, SPLIT=8, CHAINS=8, STEPS=4, EVEN=True, RANKS=6, BLOCKED=True, MIXED=False, SHARED_K=1024
"""

import triton
import triton.language as tl


SUM_UNIT: tl.constexpr = tl.constexpr(128.0)


INTERPRET: tl.constexpr = tl.constexpr(False)


UNITS: tl.constexpr = tl.constexpr(1 << 40)


WHOLE: tl.constexpr = tl.constexpr(3 << 51)


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a @ b for BF16 a and b (two- or three-dimensional), FP32 accumulate."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def load_slices(
    x_ptr,
    width,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Each warp's BF16 vector as the operand of all its sums: [CHAINS * SPLIT, STEPS * UNITS * 32 / CHAINS, 8].

    x_ptr: where the warps' parts begin, [SPLIT]. width: columns from there on that are the vector's, zeros follow; of
    WHOLE ones, zero or all. STRIDE: columns from one step of a warp to its next. UNITS of a step: 1 beside BF16
    weights, 4 beside NVFP4 ones.
    """
    SPLIT: tl.constexpr = x_ptr.shape[0]
    EACH: tl.constexpr = STEPS * UNITS // CHAINS
    each = tl.arange(0, EACH)[:, None, None, None, None]
    of_slice = tl.arange(0, 8)[None, None, :, None, None] % CHAINS
    unit = each * CHAINS + of_slice if UNITS == 1 else of_slice * EACH + each
    lane = tl.arange(0, 4)[None, None, None, :, None]
    column = unit // UNITS * STRIDE + lane * UNITS * 8 + unit % UNITS * 8
    column += tl.arange(0, 8)[None, None, None, None, :]
    width = width[None, :, None, None, None]
    x = tl.load(x_ptr[None, :, None, None, None] + column, mask=width > (0 if WHOLE else column), other=0.0)
    # Axes: unit, split, slice, lane of four, then eight columns as the instructions take them.
    x = tl.reshape(x, (EACH, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (1, 0, 4, 5, 3, 6, 2)) if UNITS == 1 else tl.permute(x, (1, 0, 5, 3, 4, 6, 2))
    x = tl.reshape(x, (1, SPLIT, EACH * 32, 8))
    return tl.reshape(tl.broadcast_to(x, (CHAINS, SPLIT, EACH * 32, 8)), (CHAINS * SPLIT, EACH * 32, 8))


@triton.jit
def own_packed(
    codes_ptr,
    scales_ptr,
    groups,
    rows,
    span,
    k,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKED: tl.constexpr,
    MIXED: tl.constexpr,
):
    """The same of NVFP4 rows: codes int32 [STEPS, ROWS / 8, SPLIT, 32 lanes, 4], scales int16 without the last axis.

    span: of each warp's rows the ``stride``, of the part that it covers the ``width`` and first column, and, where
    MIXED, whether the rows lie block by block. Else all do as BLOCKED says; then the part begins with a block.
    """
    stride, width, begin, blocked = span
    step = tl.arange(0, STEPS)[:, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, :]
    group = groups[None, :, None, None]
    stride, begin = (stride // 32)[None, None, :, None], (begin // 32)[None, None, :, None]
    # In units of the 32 columns of a lane, since all 16 bytes of codes and both scales lie within a row or outside.
    if MIXED:
        column = begin + k // 32 + step * 4 + lane % 4
        in_block = column // 4 * 32 + lane // 4 * 4 + column % 4
        own = group * stride + tl.where(blocked[None, None, :, None], in_block, lane // 4 * stride + column)
        steps = step * 0
    elif BLOCKED:
        own = lane + group * stride + begin * 8
        steps = k // 4 + step * 32
    else:
        own = lane // 4 * stride + group * stride + begin + lane % 4
        steps = k // 32 + step * 4
    codes_at = codes_ptr[None, None, :, None, None] + own[:, :, :, :, None] * 4
    codes_at += steps[:, :, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    scales_at = tl.max_contiguous(scales_ptr[None, None, :, None] + own + steps, (1, 1, 1, 1))
    inside = width[None, None, :, None] > 0
    if not EVEN:
        inside = (group + lane // 4 < rows) & (k // 32 + step * 4 + lane % 4 < (width // 32)[None, None, :, None])
    return tl.load(codes_at, mask=inside[:, :, :, :, None], other=0), tl.load(scales_at, mask=inside, other=0)


@triton.jit
def joined_values(c0, c1, c2, c3, c4, c5, c6, c7):
    """The values of a tile's words in one tensor: [STEPS, ROWS / 8, SPLIT, 32, 4, 2, 2, 2].

    The last axes are those of a word's eight codes: half of an instruction's K, instruction, pair; the instruction
    changes least often along the columns, then the half.
    """
    evens = tl.join(tl.join(c0, c2), tl.join(c4, c6))
    odds = tl.join(tl.join(c1, c3), tl.join(c5, c7))
    return tl.join(evens, odds)


@triton.jit
def scale_values(scales):
    """Both E4M3 scales of a uint16 pair of bytes, times 2^119: BF16, exact. Times 2^-7 and FP32 in the interpreter.

    The bits read as BF16 are scale * 2^-120, subnormals included.
    """
    if INTERPRET:
        first, second = scales.to(tl.int32) & 0x7F, (scales.to(tl.int32) >> 8) & 0x7F
        low, high = (first << 20).to(tl.float32, bitcast=True), (second << 20).to(tl.float32, bitcast=True)
        return low * 2.0**113, high * 2.0**113
    else:
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
def moved(words, BITS: tl.constexpr, MASK: tl.constexpr):
    """int32 words rotated to the left, and masked."""
    turned = (words << BITS) | ((words >> (32 - BITS)) & ((1 << BITS) - 1))
    return turned & (MASK - (MASK >> 31 << 32))


@triton.jit
def values_of_halves(bits, scales):
    """The halves of int32 ``bits`` read as BF16, times 2^126 and ``scales``: FP32, the lower half first."""
    low, high = (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
    return low * 2.0**126 * scales, high * 2.0**126 * scales


@triton.jit
def word_values(words, scales):
    """The eight codes of each int32 word, in the order of kernels, times a scale of :func:`scale_values`, by column.

    Exact: BF16, code * scale / SUM_UNIT; FP32 in the interpreter, which flushes BF16 subnormals to zero.
    """
    if INTERPRET:
        c0, c1 = values_of_halves(moved(words, 0, 0x81C081C0), scales)
        c2, c3 = values_of_halves(moved(words, 4, 0x81C081C0), scales)
        c4, c5 = values_of_halves(moved(words, 10, 0x81C081C0), scales)
        c6, c7 = values_of_halves(moved(words, 14, 0x81808180) | moved(words, 6, 0x00400040), scales)
        return c0, c1, c2, c3, c4, c5, c6, c7
    else:
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 s, a, b;
                mov.b32 s, {$9, $9};
                and.b32 a, $8, 0x81c081c0;
                mul.rn.bf16x2 a, a, s;
                mov.b32 {$0, $1}, a;
                shl.b32 a, $8, 4;
                and.b32 a, a, 0x81c081c0;
                mul.rn.bf16x2 a, a, s;
                mov.b32 {$2, $3}, a;
                shf.l.wrap.b32 a, $8, $8, 10;
                and.b32 a, a, 0x81c081c0;
                mul.rn.bf16x2 a, a, s;
                mov.b32 {$4, $5}, a;
                shf.l.wrap.b32 a, $8, $8, 14;
                shl.b32 b, $8, 6;
                and.b32 a, a, 0x81808180;
                and.b32 b, b, 0x00400040;
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
def tile_values(codes, scales):
    """The eight values of each word of a tile as loaded, by column, as :func:`word_values` gives them."""
    pairs: tl.constexpr = (codes.shape[0], codes.shape[1], codes.shape[2], 32, 2, 2)
    low, high = scale_values(scales)
    scale = tl.reshape(tl.broadcast_to(tl.join(low, high)[:, :, :, :, :, None], pairs), codes.shape)
    return word_values(codes, scale)


@triton.jit
def dequantise(codes, scales):
    """A tile as loaded -> code * block scale / SUM_UNIT, exact, as :func:`joined_values`: BF16, interpreted FP32."""
    c0, c1, c2, c3, c4, c5, c6, c7 = tile_values(codes, scales)
    return joined_values(c0, c1, c2, c3, c4, c5, c6, c7)


@triton.jit
def operand_of_values(values, CHAINS: tl.constexpr):
    """Values of a tile, as of :func:`joined_values`, as an operand: a chain has consecutive words."""
    STEPS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    SPLIT: tl.constexpr = values.shape[2]
    # Whole steps, or a part of one.
    SETS: tl.constexpr = CHAINS if CHAINS < STEPS else STEPS
    PARTS: tl.constexpr = CHAINS // SETS
    # Axes: set, step of it, group, split, row of eight, lane of four, part, word of it, half of K, instruction, pair.
    values = tl.reshape(values, (SETS, STEPS // SETS, GROUPS, SPLIT, 8, 4, PARTS, 4 // PARTS, 2, 2, 2))
    values = tl.permute(values, (0, 6, 3, 2, 4, 1, 7, 8, 5, 9, 10))
    return tl.reshape(values, (CHAINS * SPLIT, GROUPS * 8, STEPS * 128 // CHAINS))


@triton.jit
def packed_operand(tile, CHAINS: tl.constexpr):
    """A tile as loaded -> the operand [CHAINS * SPLIT, ROWS, STEPS * 128 / CHAINS]."""
    codes, scales = tile
    return operand_of_values(dequantise(codes, scales), CHAINS)


@triton.jit
def accumulate_own_packed(
    acc,
    tile,
    codes_ptr,
    scales_ptr,
    groups,
    rows,
    span,
    x_ptr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKED: tl.constexpr,
    MIXED: tl.constexpr,
):
    """The same of NVFP4 rows, in SUM_UNIT and without the rows' scales."""
    CHAINS: tl.constexpr = acc.shape[0] // x_ptr.shape[0]
    for k in tl.static_range(0, K, STEPS * 128):
        x = load_slices(x_ptr + k, span[1] - k, CHAINS, STEPS, 4, 128, EVEN)
        weights = packed_operand(tile, CHAINS)
        if k + STEPS * 128 < K:
            ahead = k + STEPS * 128
            tile = own_packed(codes_ptr, scales_ptr, groups, rows, span, ahead, STEPS, EVEN, BLOCKED, MIXED)
        acc = dot_bf16(weights, x, acc)
    return acc


@triton.jit
def evens_then_odds(parts):
    """Of each part its even columns, and after all of these of each its odd ones: so the last ones come in order."""
    evens, odds = (), ()
    for part in tl.static_range(len(parts)):
        x = parts[part]
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        evens, odds = evens + (even,), odds + (odd,)
    return evens + odds


@triton.jit
def columns_of(x):
    """The columns of x [ROWS, COLUMNS], a power of two up to 16 of them, each [ROWS, 1]: in one exchange."""
    columns = (x,)
    if x.shape[1] > 1:
        columns = evens_then_odds(columns)
    if x.shape[1] > 2:
        columns = evens_then_odds(columns)
    if x.shape[1] > 4:
        columns = evens_then_odds(columns)
    if x.shape[1] > 8:
        columns = evens_then_odds(columns)
    return columns


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
def combine_products(found, scale, mix, shared_scale, RANKS: tl.constexpr, PARTS: tl.constexpr):
    """What the warps have found, [SPLIT, ROWS] (FP32), weighted by ``mix`` [SPLIT] and added in order: BF16 [ROWS, 1].

    The products of the first RANKS warps are rounded each, and their sum; then the next PARTS, which are parts of one
    product, are added, rounded, and added to that. scale, shared_scale: of their rows, [SPLIT, ROWS] and [ROWS, 1];
    None beside BF16 weights.
    """
    routed = tl.arange(0, found.shape[0])[:, None] < RANKS
    product = found if scale is None else found * scale
    terms = tl.where(routed, round_bf16(product).to(tl.float32) * mix[:, None], found)
    columns = columns_of(tl.permute(terms, (1, 0)))
    total = tl.zeros_like(columns[0])
    for rank in tl.static_range(RANKS):
        total += columns[rank]
    total = round_bf16(total)
    if PARTS > 0:
        shared = columns[RANKS]
        for part in tl.static_range(RANKS + 1, RANKS + PARTS):
            shared += columns[part]
        if scale is not None:
            shared *= shared_scale
        total = round_bf16(total.to(tl.float32) + round_bf16(shared).to(tl.float32))
    return total


@triton.jit
def load_row_scales(scale_ptr, COUNT: tl.constexpr, rows):
    """FP32 scales of COUNT rows times SUM_UNIT, [COUNT, 1]; zero past ``rows``."""
    row = tl.arange(0, COUNT)
    return tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None] * SUM_UNIT


@triton.jit
def release_dependents():
    """Let the next launch start. Publishes nothing: the next launch's wait does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def row_groups(TILE: tl.constexpr):
    """First row of each group of eight of a tile: consecutive rows."""
    return tl.arange(0, TILE // 8) * 8


@triton.jit
def sum_slices(acc, SPLIT: tl.constexpr):
    """What each warp has found of a lone vector, from its sums [CHAINS * SPLIT, ROWS, 8]: [SPLIT, ROWS, 1].

    They are added in the order of :func:`sum_chains`, which adds those of several vectors.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    own = tl.arange(0, CHAINS)[:, None, None, None] == tl.arange(0, 8)[None, None, None, :]
    acc = tl.reshape(acc, (CHAINS, SPLIT, acc.shape[1], 8))
    sums = tl.sum(tl.where(own, acc, 0.0), 0)
    sums = tl.reshape(sums, (SPLIT, acc.shape[2], 2, 2, 2))
    return tl.sum(tl.sum(tl.sum(sums, 4), 2), 2)[:, :, None]


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
    BLOCKED: tl.constexpr,
    MIXED: tl.constexpr,
    SHARED_K: tl.constexpr,
):
    """y [B, 2048] = the 6 chosen experts' products, weighted and summed, plus the shared expert's."""
    release_dependents()
    first = tl.program_id(0) * TILE
    vector = tl.program_id(1)
    rows = N - first
    groups = row_groups(TILE)
    row = first + tl.arange(0, TILE)
    # Above: nothing that this step writes. Below: what its launches have made.
    wait_for_producers()
    if tl.load(ids_ptr + vector * RANKS) < 0:
        # A padded row has no expert at any rank. Nobody reads what becomes of it: it leaves at once.
        tl.store(y_ptr + vector * N + row, 0.0, mask=row < N)
        return
    # Each warp has a product: those of the ranks, then parts of the shared expert's, as wide as an expert.
    slot = tl.arange(0, SPLIT)
    routed = slot < RANKS
    product = vector * RANKS + slot
    expert = tl.load(ids_ptr + product, mask=routed, other=0).to(tl.int64)
    stride = tl.where(routed, K, SHARED_K)
    x = x_ptr + product * K
    part = (slot - RANKS) * K
    width = tl.where(routed, K, tl.minimum(SHARED_K - part, K))
    x = tl.where(routed, x, shared_x_ptr + vector * SHARED_K + part)
    codes = weight_codes_ptr + (expert * N + first) * (K // 2)
    codes = tl.where(routed, codes, shared_codes_ptr + first * SHARED_K // 2)
    scales = weight_scales_ptr + (expert * N + first) * (K // 16)
    scales = tl.where(routed, scales, shared_scales_ptr + first * SHARED_K // 16)
    codes, scales = codes.to(tl.pointer_type(tl.int32)), scales.to(tl.pointer_type(tl.int16))
    span = stride, width, tl.where(routed, 0, part), routed == BLOCKED
    tile = own_packed(codes, scales, groups, rows, span, 0, STEPS, EVEN, BLOCKED, MIXED)
    mix = tl.load(mix_ptr + product, mask=routed, other=0.0)
    known = routed[:, None] & (row < N)[None, :]
    scale = tl.load((weight_scale_ptr + expert * N)[:, None] + row[None, :], mask=known, other=0.0) * SUM_UNIT
    shared_scale = load_row_scales(shared_scale_ptr + first, TILE, rows)
    acc = tl.zeros((CHAINS * SPLIT, TILE, 8), tl.float32)
    acc = accumulate_own_packed(acc, tile, codes, scales, groups, rows, span, x, K, STEPS, EVEN, BLOCKED, MIXED)
    found = tl.reshape(sum_slices(acc, SPLIT), (SPLIT, TILE))
    total = combine_products(found, scale, mix, shared_scale, RANKS, PARTS=(SHARED_K + K - 1) // K)
    tl.store(y_ptr + vector * N + row[:, None], total, mask=(row < N)[:, None])
