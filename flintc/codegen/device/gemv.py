"""Products of weight rows with up to 8 vectors on tensor cores, without moving data between threads.

The ``m16n8k16`` instruction multiplies 16 weight rows by 8 vectors. Its lane 4g + t wants columns 2t, 2t + 1, 2t + 8
and 2t + 9 of K of weight rows g and g + 8, and of vector g. A sum does not care which column of K is called which, as
long as weights and vectors agree. So a lane loads 16 bytes of BF16, columns 8t .. 8t + 7 of every 32, and calls the
first four of them 2t, 2t + 1, 2t + 8, 2t + 9 of one instruction, the other four the same of the next: every load is
16 bytes wide and lands where the instruction reads it.

A *step* is what the four lanes of a row load at once, 32 columns. The SPLIT warps of a program take every SPLIT-th
step of K, and a tile of weights is STEPS steps of each warp, held as loaded: [STEPS, ROWS / 8, SPLIT, 32 lanes, 8].
A warp adds up its instructions in CHAINS independent sums, since each waits for the one before in its chain.
"""

import triton
import triton.language as tl

from flintc.codegen.device.numerics import dot_bf16
from flintc.codegen.device.slices import load_shared_slices, sum_chains
from flintc.codegen.device.sums import add_all


@triton.jit
def row_groups(TILE: tl.constexpr):
    """First row of each group of eight of a tile: consecutive rows."""
    return tl.arange(0, TILE // 8) * 8


@triton.jit
def paired_row_groups(TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Groups of a tile that alternate: eight gate rows, then the eight up rows of theirs, WIDTH further on."""
    group = tl.arange(0, TILE // 8)
    return group // 2 * 8 + group % 2 * WIDTH


@triton.jit
def load_weights(
    rows_ptr, groups, rows, k, K: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr
):
    """Tile of the BF16 matrix [``rows``, K] at ``rows_ptr``, from column ``k`` on; zero outside unless EVEN."""
    step = tl.arange(0, STEPS)[:, None, None, None, None]
    group = groups[None, :, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, :, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    row = group + lane // 4
    column = k + (step * SPLIT + split) * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    if EVEN:
        return tl.load(rows_ptr + row * K + column)
    else:
        return tl.load(rows_ptr + row * K + column, mask=(row < rows) & (column < K), other=0.0)


@triton.jit
def load_vectors(
    x_ptr,
    count,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Part of the BF16 vectors [``count``, K] at ``x_ptr``, from column ``k`` of K on, as the other operand.

    It is [CHAINS * SPLIT, STEPS * 32 / CHAINS, 8]: a vector in each column, zeros in those left.
    """
    step = tl.arange(0, STEPS)[:, None, None, None]
    split = tl.arange(0, SPLIT)[None, :, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    vector = lane // 4
    column = k + (step * SPLIT + split) * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, :]
    live = vector < count
    if not EVEN:
        live = live & (column < K)
    x = tl.load(x_ptr + vector * K + column, mask=live, other=0.0)
    # Axes: steps of a chain, chain, split, vector, lane of four, instruction, half of K, pair.
    x = tl.reshape(x, (STEPS // CHAINS, CHAINS, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (1, 2, 0, 5, 6, 4, 7, 3))
    return tl.reshape(x, (CHAINS * SPLIT, STEPS * 32 // CHAINS, 8))


@triton.jit
def weight_operand(tile, CHAINS: tl.constexpr):
    """A tile as loaded -> the operand [CHAINS * SPLIT, ROWS, STEPS * 32 / CHAINS]."""
    STEPS: tl.constexpr = tile.shape[0]
    GROUPS: tl.constexpr = tile.shape[1]
    SPLIT: tl.constexpr = tile.shape[2]
    # Axes: steps of a chain, chain, group, split, row of eight, lane of four, instruction, half of K, pair.
    tile = tl.reshape(tile, (STEPS // CHAINS, CHAINS, GROUPS, SPLIT, 8, 4, 2, 2, 2))
    tile = tl.permute(tile, (1, 3, 2, 4, 0, 6, 7, 5, 8))
    return tl.reshape(tile, (CHAINS * SPLIT, GROUPS * 8, STEPS * 32 // CHAINS))


@triton.jit
def accumulate(
    acc,
    tile,
    rows_ptr,
    groups,
    rows,
    x_ptr,
    count,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """acc + weight rows x vectors over all of K: FP32 [CHAINS * SPLIT, ROWS, 8], its first axis not yet summed.

    ``tile`` is the first tile of the rows, loaded by the caller; each further one is loaded a tile ahead.
    count: of vectors; None is one whose slices are the columns, see :mod:`slices`.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    for k in tl.static_range(0, K, SPLIT * STEPS * 32):
        if count is None:
            x = load_shared_slices(x_ptr, k, K, SPLIT, CHAINS, STEPS, 1, EVEN)
        else:
            x = load_vectors(x_ptr, count, k, K, SPLIT, CHAINS, STEPS, EVEN)
        weights = weight_operand(tile, CHAINS)
        ahead = k + SPLIT * STEPS * 32
        if ahead < K:
            tile = load_weights(rows_ptr, groups, rows, ahead, K, SPLIT, STEPS, EVEN)
        acc = dot_bf16(weights, x, acc)
    return acc


@triton.jit
def sum_warps(acc, SPLIT: tl.constexpr):
    """What the warps of a program have found of their shares of K, added: [ROWS, COLUMNS]."""
    shares = tl.permute(sum_chains(acc, SPLIT), (1, 2, 0))
    return tl.reshape(add_all(shares), (shares.shape[0], shares.shape[1]))


@triton.jit
def sum_pairs(acc, SPLIT: tl.constexpr):
    """The same of a paired tile: gate and up, each [ROWS / 2, COLUMNS]."""
    ROWS: tl.constexpr = acc.shape[1]
    COLUMNS: tl.constexpr = acc.shape[2]
    shares = tl.reshape(sum_chains(acc, SPLIT), (SPLIT, ROWS // 16, 2, 8, COLUMNS))
    shares = tl.permute(shares, (1, 3, 4, 2, 0))
    both = add_all(tl.reshape(shares, (ROWS // 2 * COLUMNS, 2, SPLIT)))
    gate, up = tl.split(tl.reshape(both, (ROWS // 2, COLUMNS, 2)))
    return gate, up
