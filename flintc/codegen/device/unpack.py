"""NVFP4 codes -> BF16 values in rows, by column."""

import triton
import triton.language as tl

from flintc.codegen.device.nvfp4 import scale_values, word_values


@triton.jit
def unpack_pairs(words, scales):
    """int32 words of eight codes [N, 4] and uint16 pairs of E4M3 scales [N] -> code * scale / SUM_UNIT, [N, 4, 8].

    The first scale of a pair belongs to the first two words. BF16 and exact; FP32 in the interpreter.
    """
    low, high = scale_values(scales)
    scale = tl.broadcast_to(tl.join(low, high)[:, :, None], (scales.shape[0], 2, 2))
    c0, c1, c2, c3, c4, c5, c6, c7 = word_values(words, tl.reshape(scale, words.shape))
    # Axes from left to right are the bits of a code's number.
    evens = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odds = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.join(evens, odds), (scales.shape[0], 4, 8))


@triton.jit
def place_of(lane, row):
    """Where the 32 columns of the lane ``lane`` stand in the rows of a weight, in lanes.

    row: lanes of a row where a weight lies block by block (see :mod:`flintc.ir.packed`), 0 where row follows row.
    """
    group = tl.maximum(row, 1) * 8
    first, block, inside = lane // group * 8, lane % group // 32, lane % 32
    return tl.where(row > 0, (first + inside // 4) * row + block * 4 + inside % 4, lane)
