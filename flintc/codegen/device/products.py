"""A product for each warp: the loads and sums of :mod:`gemv` and :mod:`nvfp4` where warps do not share K.

Each of SPLIT warps multiplies weight rows of its own with a vector of its own, in slices. What it has found is put in a
column of its own, so that one sum over the warps gives all products. A warp's product is told by values of shape
[SPLIT]: where its rows begin, their ``stride``, and the ``width`` of K that it covers (none: it has no product).
"""

import triton
import triton.language as tl

from flintc.codegen.device.gemv import weight_operand
from flintc.codegen.device.numerics import dot_bf16, round_bf16
from flintc.codegen.device.nvfp4 import packed_operand
from flintc.codegen.device.slices import load_slices


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
def halves(y):
    """First and second half of the columns of y [ROWS, COLUMNS]."""
    return tl.split(tl.permute(tl.reshape(y, (y.shape[0], 2, y.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def add_eight(total, y, RANKS: tl.constexpr, SHARED: tl.constexpr):
    """``total`` [ROWS] plus the first RANKS of eight columns of y [ROWS, 8] in order; see :func:`combine_columns`."""
    low, high = halves(y)
    y01, y23 = halves(low)
    y45, y67 = halves(high)
    for column in tl.static_range(0, RANKS + SHARED):
        if column < 8:
            y0, y1 = tl.split(y01 if column < 2 else y23 if column < 4 else y45 if column < 6 else y67)
            if column == RANKS:
                total = round_bf16(total).to(tl.float32)
            total += y0 if column % 2 == 0 else y1
    return total


@triton.jit
def combine_columns(y, RANKS: tl.constexpr, SHARED: tl.constexpr):
    """The first RANKS of 8 or 16 columns of y [ROWS, COLUMNS] (FP32) added in order: FP32 [ROWS].

    SHARED: that sum is rounded to BF16, and the next column added.
    """
    total = tl.zeros((y.shape[0],), tl.float32)
    if y.shape[1] == 8:
        return add_eight(total, y, RANKS, SHARED)
    else:
        low, high = halves(y)
        return add_eight(add_eight(total, low, RANKS, SHARED), high, RANKS - 8, SHARED)
