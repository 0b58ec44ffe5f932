"""Sums between the warps of a program."""

import triton
import triton.language as tl


@triton.jit
def add_neighbours(x):
    """Neighbours along the last of three axes added: half as many."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return even + odd


@triton.jit
def add_all(x):
    """Sum over the last of three axes (at most 16), as a fixed tree: [A, B, 1].

    Asked to ``split`` that axis, the compiler gives each thread all of it at once, in one exchange through shared
    memory. A reduction between warps would take three, with up to 8 lanes at a bank.
    """
    if x.shape[2] > 8:
        x = add_neighbours(x)
    if x.shape[2] > 4:
        x = add_neighbours(x)
    if x.shape[2] > 2:
        x = add_neighbours(x)
    if x.shape[2] > 1:
        x = add_neighbours(x)
    return x


@triton.jit
def sum_columns(x, WARPS: tl.constexpr):
    """Sums of the rows of x [ROWS, COLUMNS] whose columns WARPS warps hold in turn, four to a thread: [ROWS].

    Within the warps first, and between them by :func:`add_all`, in one exchange.
    """
    LANES: tl.constexpr = 128 if x.shape[1] >= WARPS * 128 else x.shape[1] // WARPS
    x = tl.reshape(x, (x.shape[0], x.shape[1] // (WARPS * LANES), WARPS, LANES))
    return tl.reshape(add_all(tl.sum(tl.sum(x, 1), 2)[:, None, :]), (x.shape[0],))
