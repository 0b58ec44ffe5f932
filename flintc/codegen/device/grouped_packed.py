"""Products of gathered rows with one expert's packed weights, dequantised on their way into the matrix instruction.

Weights are the left operand, which the instruction takes from registers, and rows of the prompt the right one. A lane
loads 16 bytes, 32 codes of one weight row, and keeps them: so a step is 128 columns, in an order in which the codes of
a word are the values that the instruction wants of the lane. The prompt's rows hold their columns in the same order:
see :func:`word_order`.
"""

import triton
import triton.language as tl

from flintc.codegen.device.grouped import load_step, row_scales, store_columns, tile_rows
from flintc.codegen.device.numerics import dot_bf16, round_bf16
from flintc.codegen.device.nvfp4 import dequantise
from flintc.codegen.device.silu import silu_mul


@triton.jit
def word_order(place):
    """The column that stands at ``place`` in the order of words, where every 128 columns are permuted among them.

    Bits of a place: word 2, half 1, instruction 1, lane 2, pair 1; of a column: lane 2, word 2, instruction 1, half 1,
    pair 1. (Half and instruction are those of the products of few rows; here they change places.)
    """
    word, half, instruction = (place >> 5) & 3, (place >> 4) & 1, (place >> 3) & 1
    lane, pair = (place >> 1) & 3, place & 1
    return (place & -128) | (lane << 5) | (word << 3) | (instruction << 2) | (half << 1) | pair


@triton.jit
def in_word_order(y):
    """The values y [columns, a multiple of 128], put into the order of words."""
    COLUMNS: tl.constexpr = y.shape[0]
    # Axes of a column: lane, word, instruction, half, pair.
    y = tl.permute(tl.reshape(y, (COLUMNS // 128, 4, 4, 2, 2, 2)), (0, 2, 4, 3, 1, 5))
    return tl.reshape(y, (COLUMNS,))


@triton.jit
def weight_columns(column, COLUMNS: tl.constexpr, ORDERED: tl.constexpr):
    """Weight rows of the output columns from ``column`` on, which are left in the order of words if ORDERED."""
    n = column + tl.arange(0, COLUMNS)
    if ORDERED:
        n = word_order(n)
    return n


@triton.jit
def load_words(codes_ptr, scales_ptr, column, k, K: tl.constexpr, COLUMNS: tl.constexpr, ORDERED: tl.constexpr):
    """128 columns from ``k`` on of the weight rows of some output columns: int32 codes, uint16 scales.

    [2, COLUMNS / 16, 32 lanes, 4 words] and [2, COLUMNS / 16, 32 lanes]: a warp holds 16 rows, a lane two of them.
    The weight lies block by block, see :mod:`flintc.ir.packed`.
    """
    half = tl.arange(0, 2)[:, None, None]
    strip = tl.arange(0, COLUMNS // 16)[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    row = column + strip * 16 + half * 8 + lane // 4
    if ORDERED:
        row = word_order(row)
    at = row // 8 * (K // 4) + k // 4 + row % 8 * 4 + lane % 4
    at = tl.max_contiguous(at, (1, 1, 1))
    words = at[:, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    codes = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + words)
    return codes, tl.load(scales_ptr.to(tl.pointer_type(tl.uint16)) + at)


@triton.jit
def weights_of(codes, scales):
    """Codes and scales as loaded -> code * scale / SUM_UNIT, BF16 [COLUMNS, 128], columns in the order of words."""
    STRIPS: tl.constexpr = codes.shape[1]
    codes = tl.reshape(codes, (2, STRIPS, 1, 32, 4))
    value = dequantise(codes, tl.reshape(scales, (2, STRIPS, 1, 32)))
    # Axes: half of a strip, strip, row of eight, lane of four, word, half, instruction, pair.
    value = tl.reshape(value, (2, STRIPS, 8, 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(value, (1, 0, 2, 4, 5, 6, 3, 7)), (STRIPS * 16, 128))


@triton.jit
def packed_gate_up_tile(
    x_ptr,
    codes_ptr,
    scales_ptr,
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
    ORDERED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """As :func:`gate_up_tile`, from packed weights, with a following tile of codes always on its way."""
    slot, pair, live = tile_rows(order_ptr, first, count, ROWS)
    at = pair // CHOSEN * K
    up_codes_ptr, up_scales_ptr = codes_ptr + N * K // 2, scales_ptr + N * K // 16
    gates = tl.zeros((COLUMNS, ROWS), tl.float32)
    ups = tl.zeros((COLUMNS, ROWS), tl.float32)
    gate, gate_scales = load_words(codes_ptr, scales_ptr, column, 0, K, COLUMNS, ORDERED)
    up, up_scales = load_words(up_codes_ptr, up_scales_ptr, column, 0, K, COLUMNS, ORDERED)
    for k in range(0, K, 128):
        x = tl.trans(load_step(x_ptr, at, k, K, 128))
        # The last step loads its own once more.
        ahead = tl.minimum(k + 128, K - 128)
        gate_weights = weights_of(gate, gate_scales)
        gate, gate_scales = load_words(codes_ptr, scales_ptr, column, ahead, K, COLUMNS, ORDERED)
        gates = dot_bf16(gate_weights, x, gates)
        up_weights = weights_of(up, up_scales)
        up, up_scales = load_words(up_codes_ptr, up_scales_ptr, column, ahead, K, COLUMNS, ORDERED)
        ups = dot_bf16(up_weights, x, ups)
    n = weight_columns(column, COLUMNS, ORDERED)
    gates *= row_scales(scale_ptr, n, N)
    ups *= row_scales(scale_ptr + N, n, N)
    store_columns(y_ptr, slot, live, silu_mul(gates, ups), column, N)


@triton.jit
def packed_down_tile(
    x_ptr,
    codes_ptr,
    scales_ptr,
    scale_ptr,
    y_ptr,
    order_ptr,
    first,
    count,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """As :func:`down_tile`, from packed weights, for BLOCKS times COLUMNS columns one after the other.

    One loop runs over all of them, so that the next block's loads are on their way while a block is stored.
    """
    PARTS: tl.constexpr = K // 128
    slot, pair, live = tile_rows(order_ptr, first, count, ROWS)
    codes, scales = load_words(codes_ptr, scales_ptr, column, 0, K, COLUMNS, False)
    y = tl.zeros((COLUMNS, ROWS), tl.float32)
    for i in range(0, BLOCKS * PARTS):
        x = tl.trans(load_step(x_ptr, slot * K, i % PARTS * 128, K, 128))
        weights = weights_of(codes, scales)
        # The last step loads its own once more.
        ahead = tl.minimum(i + 1, BLOCKS * PARTS - 1)
        block = column + ahead // PARTS * COLUMNS
        codes, scales = load_words(codes_ptr, scales_ptr, block, ahead % PARTS * 128, K, COLUMNS, False)
        y = dot_bf16(weights, x, y)
        if i % PARTS == PARTS - 1:
            begin = column + i // PARTS * COLUMNS
            scale = row_scales(scale_ptr, begin + tl.arange(0, COLUMNS), N)
            store_columns(y_ptr, pair, live, round_bf16(y * scale), begin, N)
            y = tl.zeros((COLUMNS, ROWS), tl.float32)
