"""Hand-over from the programs of a group to the last of them, or to the last few."""

import triton
import triton.language as tl

from flintc.codegen.device.mode import INTERPRET


@triton.jit
def arrive_last(counter_ptr, group):
    """True in exactly one of ``group`` programs: the last to get here. It then sees all stores before their calls.

    The last program puts the counter back to zero, so that a replay of the launch needs no reset.
    """
    # Every thread's stores must precede the one atomic that publishes them.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == group - 1
    if last:
        tl.store(counter_ptr, 0)
    # The last program's other threads may load only after the acquire.
    tl.debug_barrier()
    return last


@triton.jit
def few_of(groups, most, WAITING: tl.constexpr):
    """How many of each of ``groups`` groups go on together, 1 to ``most``: so few that at most WAITING programs wait.

    A program that waits keeps its place on the GPU, and those that it waits for may not have one yet: were every place
    held by one who waits, nobody would ever go on. In the interpreter a program ends before the next begins.
    """
    few = 1
    if not INTERPRET:
        few = tl.minimum(1 + WAITING // groups, most)
    return few


@triton.jit
def arrive_few(counter_ptr, group, few):
    """Whether this is one of the last ``few`` of ``group`` programs to get here, and which: 0 to few - 1.

    These go on once all have arrived, and then see all stores before their calls; each of them calls
    :func:`leave_few` when it is done. few: of :func:`few_of`, and at most ``group``.
    """
    # Every thread's stores must precede the one atomic that publishes them.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    which = arrived - (group - few)
    if which >= 0:
        seen = arrived + 1
        # The lower half: some of the few may have left before another of them looks.
        while (seen & 0xFFFF) < group:
            seen = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    # The other threads may load only after the acquire.
    tl.debug_barrier()
    return which >= 0, which


@triton.jit
def leave_few(counter_ptr, few):
    """The last of the ``few`` to be done puts the counter back to zero: then none of them looks at it any more."""
    left = tl.atomic_add(counter_ptr, 0x10000, sem="acq_rel", scope="gpu")
    if (left >> 16) == few - 1:
        tl.store(counter_ptr, 0)
