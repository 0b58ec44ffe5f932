"""Products of rows gathered from anywhere with a tile of one expert's weights [rows, K]."""

import triton
import triton.language as tl

from flintc.codegen.device.numerics import dot_bf16


@triton.jit
def load_columns(x, k, K: tl.constexpr, STEP: tl.constexpr):
    """Columns ``k`` to ``k + STEP - 1`` of the rows that begin at the pointers ``x``; zero past K."""
    column = k + tl.arange(0, STEP)
    if K % STEP == 0:
        return tl.load(x[:, None] + column[None, :])
    else:
        return tl.load(x[:, None] + column[None, :], mask=(column < K)[None, :], other=0.0)


@triton.jit
def weight_rows(weight_ptr, column, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the weight rows of COLUMNS output columns; past N the last one stands in."""
    n = column + tl.arange(0, COLUMNS)
    if N % COLUMNS != 0:
        n = tl.minimum(n, N - 1)
    return weight_ptr + n.to(tl.int64) * K


@triton.jit
def grouped_dot(
    x,
    weight_ptr,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The rows at the pointers ``x`` [ROWS] times weight rows from ``column`` on: FP32 [ROWS, COLUMNS]."""
    w = weight_rows(weight_ptr, column, N, K, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, STEP):
        acc = dot_bf16(load_columns(x, k, K, STEP), tl.trans(load_columns(w, k, K, STEP)), acc)
    return acc


@triton.jit
def grouped_pair(
    x,
    weight_ptr,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The same with the weight rows from ``column`` on, and with those N further down: gate and up."""
    gate, up = weight_rows(weight_ptr, column, N, K, COLUMNS), weight_rows(weight_ptr + N * K, column, N, K, COLUMNS)
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, STEP):
        part = load_columns(x, k, K, STEP)
        gates = dot_bf16(part, tl.trans(load_columns(gate, k, K, STEP)), gates)
        ups = dot_bf16(part, tl.trans(load_columns(up, k, K, STEP)), ups)
    return gates, ups
