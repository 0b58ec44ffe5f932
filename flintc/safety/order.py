"""Which launches are surely complete at each point of each launch.

A launch with the attribute may start once every program of the launch before has triggered or ended; its wait returns
once that launch is complete, all its stores visible. Nothing else is promised. What came earlier still is complete only
because the launch before waited for it in turn. Sets of launches are bit masks: bit 0 stands for the caller (what
wrote the step's inputs, and the steps before), bit i + 1 for the i-th launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flintc.ir.plan import Kernel, Path
from flintc.safety.access import first_wait

#: The caller's bit.
CALLER = 1


@dataclass(frozen=True, slots=True)
class Complete:
    """Launches that are surely complete when a launch starts, and when its wait has returned."""

    at_start: int
    below_wait: int


def bit(index: int) -> int:
    """The bit of the launch at ``index`` of the plan."""
    return CALLER << (index + 1)


def completions(kernels: Iterable[Kernel]) -> Iterator[Complete]:
    """For each launch in order, given its kernel."""
    everything = ended = CALLER  # the caller itself follows the steps before it
    may_start = 0
    for index, kernel in enumerate(kernels):
        start = may_start if kernel.waits else everything
        below = start | ended if any(_waits_surely(path) for path in kernel.paths) else start
        yield Complete(start, below)
        # It is complete only once those of its programs that wait have waited.
        all_wait = all(_waits_surely(path) for path in kernel.paths)
        ended = bit(index) | (below if all_wait else start)
        may_start = start if any(_triggers_early(path) for path in kernel.paths) else (below if all_wait else start)
        everything |= bit(index)


def _waits_surely(path: Path) -> bool:
    return any(effect.kind == "wait" and effect.sure for effect in path)


def _triggers_early(path: Path) -> bool:
    return any(effect.kind == "trigger" for effect in path[: first_wait(path)])
