"""Of a cache, the positions that earlier steps have written: these may be read while this step's launches still run."""

import triton
import triton.language as tl


@triton.jit
def first_of_step(positions_ptr, seqs_ptr, seq, ROWS: tl.constexpr):
    """The first position that this step writes of the sequence ``seq``; 0 of a padded row, which has none (-1).

    A step's rows, at most ROWS, are its launch's programs along the first axis.
    """
    row = tl.arange(0, ROWS)
    inside = row < tl.num_programs(0)
    own = tl.load(seqs_ptr + row, mask=inside, other=-1) == seq
    position = tl.load(positions_ptr + row, mask=inside, other=0)
    first = tl.min(tl.where(own, position, 0x7FFFFFFF), 0)
    return tl.where(seq >= 0, first, 0)


@triton.jit
def load_earlier(pointers, position, seen, first):
    """What ``pointers`` into a cache point at, where ``seen`` (bool) and ``position`` is before ``first``; else zero.

    first: of :func:`first_of_step`. So it may stand above the wait, where this step's positions are yet to be written.
    """
    return tl.load(pointers, mask=seen & (position < first), other=0.0)
