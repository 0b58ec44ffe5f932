"""A product for each warp: the loads and sums of :mod:`gemv` and :mod:`nvfp4` where warps do not share K.

Each of SPLIT warps multiplies weight rows of its own with a vector of its own, in slices; at the end one exchange
brings all products of a row together. A warp's product is told by values of shape [SPLIT]: where its rows begin, their
``stride``, and the ``width`` of K that it covers (none: it has no product).
"""

import triton
import triton.language as tl

from flintc.codegen.device.gemv import weight_operand
from flintc.codegen.device.numerics import dot_bf16, round_bf16
from flintc.codegen.device.nvfp4 import packed_operand
from flintc.codegen.device.slices import load_slices
from flintc.codegen.device.sums import columns_of


@triton.jit
def own_weights(rows_ptr, groups, rows, stride, width, k, STEPS: tl.constexpr, EVEN: tl.constexpr):
    """Tile of each warp's BF16 rows from column ``k`` on: [STEPS, ROWS / 8, SPLIT, 32 lanes, 8]; zero outside."""
    step = tl.arange(0, STEPS)[:, None, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    row = groups[None, :, None, None, None] + lane // 4
    column = k + step * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    at = rows_ptr[None, None, :, None, None] + row * stride[None, None, :, None, None] + column
    if EVEN:
        # A warp that has no product has no columns either.
        return tl.load(at, mask=width[None, None, :, None, None] > 0, other=0.0)
    else:
        return tl.load(at, mask=(row < rows) & (column < width[None, None, :, None, None]), other=0.0)


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
def accumulate_own(
    acc,
    tile,
    rows_ptr,
    groups,
    rows,
    stride,
    width,
    x_ptr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """acc + every warp's BF16 rows times its vector, over at most K columns: FP32 [CHAINS * SPLIT, ROWS, 8], in slices.

    ``tile`` is the first tile of the rows, loaded by the caller.
    """
    CHAINS: tl.constexpr = acc.shape[0] // x_ptr.shape[0]
    for k in tl.static_range(0, K, STEPS * 32):
        x = load_slices(x_ptr + k, width - k, CHAINS, STEPS, 1, 32, EVEN)
        weights = weight_operand(tile, CHAINS)
        if k + STEPS * 32 < K:
            tile = own_weights(rows_ptr, groups, rows, stride, width, k + STEPS * 32, STEPS, EVEN)
        acc = dot_bf16(weights, x, acc)
    return acc


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
