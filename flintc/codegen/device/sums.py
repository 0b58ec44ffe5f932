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
def evens_then_odds(parts):
    """Of each part its even columns, and after all of these of each its odd ones: so the last ones come in order."""
    evens, odds = (), ()
    for part in tl.static_range(len(parts)):
        x = parts[part]
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        evens, odds = evens + (even,), odds + (odd,)
    return evens + odds


@triton.jit
def sum_columns(x, WARPS: tl.constexpr):
    """Sums of the rows of x [ROWS, COLUMNS] whose columns WARPS warps hold in turn, four to a thread: [ROWS].

    Within the warps first, and between them by :func:`add_all`, in one exchange.
    """
    LANES: tl.constexpr = 128 if x.shape[1] >= WARPS * 128 else x.shape[1] // WARPS
    x = tl.reshape(x, (x.shape[0], x.shape[1] // (WARPS * LANES), WARPS, LANES))
    return tl.reshape(add_all(tl.sum(tl.sum(x, 1), 2)[:, None, :]), (x.shape[0],))
