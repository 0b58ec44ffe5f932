"""Attention of a block of a prompt's rows to keys that lie side by side: scores of a tile never leave the program.

A program serves the TOKENS rows of a block for one key head, that is GROUP query heads of each: TOKENS * GROUP rows of
a matrix, the heads of a row side by side. Exponentials are powers of two: scores carry log2(e).
"""

import triton
import triton.language as tl

from flintc.codegen.device.numerics import dot_bf16, round_bf16

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tiles(
    o,
    m,
    l,
    q,
    keys_ptr,
    values_ptr,
    begin,
    end,
    newest,
    SCALE: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """o, m, l after the keys from ``begin`` (a multiple of TILE) to ``end`` - 1; ``newest`` [ROWS] is each row's last.

    o: FP32 [ROWS, channels], the sum of bf16(p) * v; l: the sum of p; p = 2 ** (s - m). WINDOW 0: no window.
    MASKED: whether there are rows that do not see all of these keys; the others are not read.
    """
    channel = tl.arange(0, q.shape[1])
    for first in range(begin, end, TILE):
        key = first + tl.arange(0, TILE)
        at = key[:, None] * HEAD + channel[None, :]
        if MASKED:
            there = (key < end)[:, None] & (channel < HEAD)[None, :]
            k = tl.load(keys_ptr + at, mask=there, other=0.0)
        elif q.shape[1] == HEAD:
            k = tl.load(keys_ptr + at)
        else:
            k = tl.load(keys_ptr + at, mask=(channel < HEAD)[None, :], other=0.0)
        s = dot_bf16(q, tl.trans(k), tl.zeros((q.shape[0], TILE), tl.float32))
        if MASKED:
            seen = key[None, :] <= newest[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > newest[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1) * (SCALE * LOG2_E))
        p = tl.exp2(s * (SCALE * LOG2_E) - top[:, None])
        keep = tl.exp2(m - top)
        l = l * keep + tl.sum(p, 1)
        if MASKED:
            v = tl.load(values_ptr + at, mask=there, other=0.0)
        elif q.shape[1] == HEAD:
            v = tl.load(values_ptr + at)
        else:
            v = tl.load(values_ptr + at, mask=(channel < HEAD)[None, :], other=0.0)
        o = dot_bf16(round_bf16(p), v, o * keep[:, None])
        m = top
    return o, m, l
