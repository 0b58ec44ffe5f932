"""Hand-over from the programs of a group to the last of them."""

import triton
import triton.language as tl


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
