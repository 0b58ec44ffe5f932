"""Products of up to ROWS rows, gathered from anywhere, with one expert's weights [N, K] in BF16.

Weights are the left operand, so that few rows make a narrow product, and results are [columns, rows].
"""

import triton
import triton.language as tl

from flintc.codegen.device.numerics import dot_bf16, round_bf16
from flintc.codegen.device.nvfp4 import SUM_UNIT
from flintc.codegen.device.silu import silu_mul


@triton.jit
def tile_rows(order_ptr, first, count, ROWS: tl.constexpr):
    """A tile's places in the order of experts, the pairs of a row and a chosen expert that stand there, which are live.

    Places that are not live repeat the first, so that whatever is loaded for them is there.
    """
    member = tl.arange(0, ROWS)
    slot = first + tl.where(member < count, member, 0)
    return slot, tl.load(order_ptr + slot), member < count


@triton.jit
def store_columns(y_ptr, row, live, y, column, N: tl.constexpr):
    """Store y [COLUMNS, ROWS] as columns from ``column`` on of the rows ``row`` of a matrix with N columns."""
    n = column + tl.arange(0, y.shape[0])
    inside = live[:, None] & (n < N)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * N + n[None, :], tl.trans(y), mask=inside)


@triton.jit
def row_scales(scale_ptr, n, N: tl.constexpr):
    """Scales of the weight rows ``n`` in SUM_UNIT, [COLUMNS, 1]; past N zero."""
    return (tl.load(scale_ptr + n, mask=n < N, other=0.0) * SUM_UNIT)[:, None]


@triton.jit
def load_step(base_ptr, at, k, K: tl.constexpr, STEP: tl.constexpr):
    """Columns ``k`` to ``k + STEP - 1`` of the rows at ``at``; zero past K."""
    column = tl.arange(0, STEP)
    if K % STEP == 0:
        return tl.load(base_ptr + k + (at[:, None] + column[None, :]))
    else:
        return tl.load(base_ptr + k + (at[:, None] + column[None, :]), mask=(k + column < K)[None, :], other=0.0)


@triton.jit
def gate_up_tile(
    x_ptr,
    weight_ptr,
    scale_ptr,
    y_ptr,
    order_ptr,
    first,
    count,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """silu(gate) * up of a tile's rows, for COLUMNS columns; gate and up are N weight rows apart and stay FP32."""
    slot, pair, live = tile_rows(order_ptr, first, count, ROWS)
    at = pair // CHOSEN * K
    n = column + tl.arange(0, COLUMNS)
    rows = tl.minimum(n, N - 1) * K
    gate = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, K, STEP):
        x = tl.trans(load_step(x_ptr, at, k, K, STEP))
        gate = dot_bf16(load_step(weight_ptr, rows, k, K, STEP), x, gate)
        up = dot_bf16(load_step(weight_ptr + N * K, rows, k, K, STEP), x, up)
    if scale_ptr is not None:
        gate *= row_scales(scale_ptr, n, N)
        up *= row_scales(scale_ptr + N, n, N)
    store_columns(y_ptr, slot, live, silu_mul(gate, up), column, N)


@triton.jit
def down_tile(
    x_ptr,
    weight_ptr,
    scale_ptr,
    y_ptr,
    order_ptr,
    first,
    count,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """COLUMNS columns of a tile's rows, rounded, stored where their pairs belong."""
    slot, pair, live = tile_rows(order_ptr, first, count, ROWS)
    n = column + tl.arange(0, COLUMNS)
    rows = tl.minimum(n, N - 1) * K
    y = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, K, STEP):
        x = tl.trans(load_step(x_ptr, slot * K, k, K, STEP))
        y = dot_bf16(load_step(weight_ptr, rows, k, K, STEP), x, y)
    if scale_ptr is not None:
        y *= row_scales(scale_ptr, n, N)
    store_columns(y_ptr, pair, live, round_bf16(y), column, N)
