"""One vector at a time: its K cut into slices, each of which takes a column of the instruction that has no vector.

The ``m16n8k16`` instruction multiplies 16 weight rows by 8 vectors. Of a lone vector a lane would load everything that
the instructions need of it, while seven of eight lanes load nothing. So K is cut into CHAINS slices, one for each sum
that a warp keeps. An instruction of slice i multiplies its weights with slice i of the vector in column i, and with
other slices in other columns. Only column i of sum i is wanted, and what is in the others is never looked at. So every
lane loads a CHAINS-th of its warp's part, an eighth at best, and hands the same registers to all instructions.

A slice is made of *units*, a lane's 16 bytes of x: a step of BF16 weights is one, one of NVFP4 weights four. They are
shared out as several vectors' are, so that a row's bits do not depend on the batch: BF16 ones in turn, see
:func:`weight_operand`, NVFP4 ones in consecutive runs, see :func:`operand_of_values`.
"""

import triton
import triton.language as tl


@triton.jit
def load_slices(
    x_ptr,
    width,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Each warp's BF16 vector as the operand of all its sums: [CHAINS * SPLIT, STEPS * UNITS * 32 / CHAINS, 8].

    x_ptr: where the warps' parts begin, [SPLIT]. width: columns from there on that are the vector's, zeros follow; of
    WHOLE ones, zero or all. STRIDE: columns from one step of a warp to its next. UNITS of a step: 1 beside BF16
    weights, 4 beside NVFP4 ones.
    """
    SPLIT: tl.constexpr = x_ptr.shape[0]
    EACH: tl.constexpr = STEPS * UNITS // CHAINS
    each = tl.arange(0, EACH)[:, None, None, None, None]
    of_slice = tl.arange(0, 8)[None, None, :, None, None] % CHAINS
    unit = each * CHAINS + of_slice if UNITS == 1 else of_slice * EACH + each
    lane = tl.arange(0, 4)[None, None, None, :, None]
    column = unit // UNITS * STRIDE + lane * UNITS * 8 + unit % UNITS * 8
    column += tl.arange(0, 8)[None, None, None, None, :]
    width = width[None, :, None, None, None]
    x = tl.load(x_ptr[None, :, None, None, None] + column, mask=width > (0 if WHOLE else column), other=0.0)
    # Axes: unit, split, slice, lane of four, then eight columns as the instructions take them.
    x = tl.reshape(x, (EACH, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (1, 0, 4, 5, 3, 6, 2)) if UNITS == 1 else tl.permute(x, (1, 0, 5, 3, 4, 6, 2))
    x = tl.reshape(x, (1, SPLIT, EACH * 32, 8))
    return tl.reshape(tl.broadcast_to(x, (CHAINS, SPLIT, EACH * 32, 8)), (CHAINS * SPLIT, EACH * 32, 8))


@triton.jit
def load_shared_slices(
    x_ptr,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The same of one vector [K] at ``x_ptr`` from column ``k`` on, whose steps the SPLIT warps take in turn."""
    begin = k + tl.arange(0, SPLIT) * UNITS * 32
    return load_slices(x_ptr + begin, K - begin, CHAINS, STEPS, UNITS, SPLIT * UNITS * 32, EVEN)


@triton.jit
def sum_slices(acc, SPLIT: tl.constexpr):
    """What each warp has found of a lone vector, from its sums [CHAINS * SPLIT, ROWS, 8]: [SPLIT, ROWS, 1].

    They are added in the order of :func:`sum_chains`, which adds those of several vectors.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    own = tl.arange(0, CHAINS)[:, None, None, None] == tl.arange(0, 8)[None, None, None, :]
    acc = tl.reshape(acc, (CHAINS, SPLIT, acc.shape[1], 8))
    sums = tl.sum(tl.where(own, acc, 0.0), 0)
    sums = tl.reshape(sums, (SPLIT, acc.shape[2], 2, 2, 2))
    return tl.sum(tl.sum(tl.sum(sums, 4), 2), 2)[:, :, None]


@triton.jit
def sum_chains(acc, SPLIT: tl.constexpr):
    """The warps' sums [CHAINS * SPLIT, ROWS, COLUMNS], chains added: [SPLIT, ROWS, COLUMNS], within each thread.

    Of chains 4a + 2b + c those that differ in c first, then in a, then in b.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    if CHAINS == 8:
        acc = tl.reshape(acc, (2, 2, 2, SPLIT, acc.shape[1], acc.shape[2]))
        acc = tl.sum(tl.sum(acc, 2), 0)
    elif CHAINS == 4:
        acc = tl.sum(tl.reshape(acc, (2, 2, SPLIT, acc.shape[1], acc.shape[2])), 1)
    elif CHAINS < 4:
        acc = tl.reshape(acc, (CHAINS, SPLIT, acc.shape[1], acc.shape[2]))
    return tl.sum(acc, 0)
