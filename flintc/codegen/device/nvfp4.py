"""The products of :mod:`gemv` with packed NVFP4 weights: 4-bit codes, one E4M3 scale per 16 columns, FP32 per row.

A lane's 16 bytes are 32 codes, so a step is 128 columns, of which 32t .. 32t + 31 belong to lane t. A word of eight
codes feeds two instructions, which take pairs of columns: (0, 1) and (2, 3) go to the one, (4, 5) and (6, 7) to the
other, as the registers of a vector's eight neighbours lie.

A code becomes BF16 by moving its bits (the sign to bit 15, the rest to bits 8 .. 6), which gives its value times
2^-126. Times a block scale that carries 2^119 this is code * scale * 2^-7, exact; the 2^7 is left to ``SUM_UNIT``. The
bits of a word stand so that a rotation and a mask move a pair: see :mod:`flintc.reference.kernel_order`.
"""

import triton
import triton.language as tl

from flintc.codegen.device.mode import INTERPRET
from flintc.codegen.device.numerics import dot_bf16
from flintc.codegen.device.slices import load_shared_slices

#: What 1.0 in a sum of products stands for.
SUM_UNIT: tl.constexpr = tl.constexpr(128.0)


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
def low_bits(c0, c1, c2, c3, c4, c5, c6, c7):
    """The bits of all eight values of a word of :func:`word_values`, one upon the other, two values to an int32."""
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b;
            mov.b32 a, {$1, $2};
            mov.b32 b, {$3, $4};
            or.b32 a, a, b;
            mov.b32 b, {$5, $6};
            or.b32 a, a, b;
            mov.b32 b, {$7, $8};
            or.b32 $0, a, b;
        }""",
        "=r,h,h,h,h,h,h,h,h",
        [c0, c1, c2, c3, c4, c5, c6, c7],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def hold_above(c0, c1, c2, c3, c4, c5, c6, c7):
    """Keep the assembler from moving what computes a tile's :func:`word_values` below what follows.

    It sinks arithmetic towards its use, past a wait that the arithmetic would have filled. So the values decide here
    about a fence, which it may not move, and which no values ever run: their lowest bits are zero, since the product of
    a code (two significant bits) and a scale (four) has six of the eight that BF16 keeps.
    """
    if not INTERPRET:
        bits = low_bits(c0, c1, c2, c3, c4, c5, c6, c7)
        # Words of a lane, groups, steps: all a thread's own.
        bits = tl.reduce_or(tl.reduce_or(tl.reduce_or(bits, 4), 1), 0)
        tl.inline_asm_elementwise(
            """{
                .reg .pred odd;
                .reg .b32 a;
                and.b32 a, $1, 0x00010001;
                setp.ne.u32 odd, a, 0;
                @odd membar.cta;
                mov.u32 $0, 0;
            }""",
            "=r,r",
            [bits],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
    BLOCKED: tl.constexpr,
):
    """Tile of the NVFP4 matrix [``rows``, K], from column ``k`` on: words of codes, and pairs of scale bytes.

    Codes are int32 [STEPS, ROWS / 8, SPLIT, 32 lanes, 4], scales uint16 without the last axis. BLOCKED: the matrix lies
    block by block, see :mod:`flintc.ir.packed`.
    """
    step = tl.arange(0, STEPS)[:, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, :, None]
    lane = tl.arange(0, 32)[None, None, None, :]
    # In units of the 32 columns of a lane, since all 16 bytes of codes and both scales lie within K or outside. What is
    # a thread's own first, and the steps from there after: the steps become parts of instructions.
    if BLOCKED:
        own = lane + split * 32
        steps = groups[None, :, None, None] * (K // 32) + (k // 4 + step * SPLIT * 32)
    else:
        own = lane // 4 * (K // 32) + split * 4 + lane % 4
        steps = groups[None, :, None, None] * (K // 32) + (k // 32 + step * SPLIT * 4)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + own[:, :, :, :, None] * 4
    codes_ptr += steps[:, :, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    # Four lanes' scales lie side by side; told so, the compiler would let one lane load them for the others.
    scales_ptr = tl.max_contiguous(scales_ptr.to(tl.pointer_type(tl.uint16)) + own + steps, (1, 1, 1, 1))
    if EVEN:
        return tl.load(codes_ptr), tl.load(scales_ptr)
    else:
        row = groups[None, :, None, None] + lane // 4
        inside = (row < rows) & (k // 32 + (step * SPLIT + split) * 4 + lane % 4 < K // 32)
        codes = tl.load(codes_ptr, mask=inside[:, :, :, :, None], other=0)
        return codes, tl.load(scales_ptr, mask=inside, other=0)


@triton.jit
def tile_values(codes, scales):
    """The eight values of each word of a tile as loaded, by column, as :func:`word_values` gives them."""
    pairs: tl.constexpr = (codes.shape[0], codes.shape[1], codes.shape[2], 32, 2, 2)
    low, high = scale_values(scales)
    scale = tl.reshape(tl.broadcast_to(tl.join(low, high)[:, :, :, :, :, None], pairs), codes.shape)
    return word_values(codes, scale)


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
def dequantise(codes, scales):
    """A tile as loaded -> code * block scale / SUM_UNIT, exact, as :func:`joined_values`: BF16, interpreted FP32."""
    c0, c1, c2, c3, c4, c5, c6, c7 = tile_values(codes, scales)
    return joined_values(c0, c1, c2, c3, c4, c5, c6, c7)


@triton.jit
def packed_operand(tile, CHAINS: tl.constexpr):
    """A tile as loaded -> the operand [CHAINS * SPLIT, ROWS, STEPS * 128 / CHAINS]."""
    codes, scales = tile
    return operand_of_values(dequantise(codes, scales), CHAINS)


@triton.jit
def held_operand(tile, CHAINS: tl.constexpr):
    """The same, unpacked above a wait that follows."""
    codes, scales = tile
    c0, c1, c2, c3, c4, c5, c6, c7 = tile_values(codes, scales)
    hold_above(c0, c1, c2, c3, c4, c5, c6, c7)
    return operand_of_values(joined_values(c0, c1, c2, c3, c4, c5, c6, c7), CHAINS)


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
def load_vectors_of_words(
    x_ptr,
    count,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Part of the BF16 vectors [``count``, K] at ``x_ptr``, from column ``k`` of K on, in the order of packed weights.

    It is [CHAINS * SPLIT, STEPS * 128 / CHAINS, 8]: a vector in each column, zeros in those left.
    """
    step = tl.arange(0, STEPS)[:, None, None, None, None]
    word = tl.arange(0, 4)[None, :, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, :, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    each = tl.arange(0, 8)[None, None, None, None, :]
    live = lane // 4 < count
    if not EVEN:
        live = live & (k + ((step * SPLIT + split) * 4 + lane % 4) * 32 + word * 8 + each < K)
    x_ptr += lane // 4 * K + (split * 4 + lane % 4) * 32
    x = tl.load(x_ptr + (k + step * SPLIT * 128 + word * 8 + each), mask=live, other=0.0)
    SETS: tl.constexpr = CHAINS if CHAINS < STEPS else STEPS
    PARTS: tl.constexpr = CHAINS // SETS
    # Axes: set, step of it, part, word of it, split, vector, lane of four, instruction, half of K, pair.
    x = tl.reshape(x, (SETS, STEPS // SETS, PARTS, 4 // PARTS, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (0, 2, 4, 1, 3, 8, 6, 7, 9, 5))
    return tl.reshape(x, (CHAINS * SPLIT, STEPS * 128 // CHAINS, 8))


@triton.jit
def accumulate_packed(
    acc,
    tile,
    codes_ptr,
    scales_ptr,
    groups,
    rows,
    x_ptr,
    count,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """acc + weight rows x vectors over all of K, in SUM_UNIT: FP32 [CHAINS * SPLIT, ROWS, 8], see accumulate."""
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    for k in tl.static_range(0, K, SPLIT * STEPS * 128):
        if count is None:
            x = load_shared_slices(x_ptr, k, K, SPLIT, CHAINS, STEPS, 4, EVEN)
        else:
            x = load_vectors_of_words(x_ptr, count, k, K, SPLIT, CHAINS, STEPS, EVEN)
        weights = packed_operand(tile, CHAINS)
        ahead = k + SPLIT * STEPS * 128
        if ahead < K:
            tile = load_packed(codes_ptr, scales_ptr, groups, rows, ahead, K, SPLIT, STEPS, EVEN, BLOCKED)
        acc = dot_bf16(weights, x, acc)
    return acc


@triton.jit
def accumulate_operand(
    acc,
    weights,
    x_ptr,
    count,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The same where one tile, unpacked by the caller, holds all of K: acc + ``weights`` x ``count`` vectors."""
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    if count is None:
        x = load_shared_slices(x_ptr, 0, K, SPLIT, CHAINS, STEPS, 4, True)
    else:
        x = load_vectors_of_words(x_ptr, count, 0, K, SPLIT, CHAINS, STEPS, True)
    return dot_bf16(weights, x, acc)


@triton.jit
def accumulate_halves(
    tile,
    x_ptr,
    count,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What a tile that holds all of K finds of several vectors, the chains added: FP32 [SPLIT, ROWS, 8].

    One half of the eight chains is done after the other, so that fewer sums wait in registers; they are added in the
    order of :func:`sum_chains`.
    """
    low, high = halves_of_tile(tile, STEPS)
    acc = add_half(low, x_ptr, count, 0, K, SPLIT, CHAINS // 2, STEPS // 2, EVEN)
    acc += add_half(high, x_ptr, count, STEPS // 2 * SPLIT * 128, K, SPLIT, CHAINS // 2, STEPS // 2, EVEN)
    return tl.sum(acc, 0)


@triton.jit
def halves_of_tile(tile, STEPS: tl.constexpr):
    """A tile as loaded -> its first and its second half of the steps."""
    codes, scales = tile
    codes = tl.reshape(codes, (2, STEPS // 2, codes.shape[1], codes.shape[2], 32, 4))
    scales = tl.reshape(scales, (2, STEPS // 2, scales.shape[1], scales.shape[2], 32))
    low, high = tl.split(tl.permute(codes, (1, 2, 3, 4, 5, 0)))
    low_scales, high_scales = tl.split(tl.permute(scales, (1, 2, 3, 4, 0)))
    return (low, low_scales), (high, high_scales)


@triton.jit
def add_half(
    tile,
    x_ptr,
    count,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The four chains of a tile that begins with column ``k``, neighbours added: FP32 [2, SPLIT, ROWS, 8]."""
    x = load_vectors_of_words(x_ptr, count, k, K, SPLIT, CHAINS, STEPS, EVEN)
    weights = packed_operand(tile, CHAINS)
    ROWS: tl.constexpr = weights.shape[1]
    acc = dot_bf16(weights, x, tl.zeros((CHAINS * SPLIT, ROWS, 8), tl.float32))
    return tl.sum(tl.reshape(acc, (2, 2, SPLIT, ROWS, 8)), 1)


@triton.jit
def load_row_scales(scale_ptr, COUNT: tl.constexpr, rows):
    """FP32 scales of COUNT rows times SUM_UNIT, [COUNT, 1]; zero past ``rows``."""
    row = tl.arange(0, COUNT)
    return tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None] * SUM_UNIT
