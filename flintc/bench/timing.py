"""Timing on the device: events around each repeat, medians of many."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flintc.errors import BackendError

#: A chain is timed over at least so many milliseconds, where it need not be repeated more often than this for it.
_LEAST_MS, _MOST_TIMES = 0.2, 64
#: How often the two are timed before noise is taken to be more than the chain.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of repeated runs, sorted."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the repeats."""
        return self.ms[len(self.ms) // 2]

    def percentile(self, percent: float) -> float:
        """The repeat below which ``percent`` of all lie."""
        return self.ms[min(len(self.ms) - 1, int(len(self.ms) * percent / 100))]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A decode step as it was measured.

    ms: median. launches: kernels by the profiler. nbytes: read and written by them, None where not known. how: what
    ran, in words.
    """

    ms: float
    launches: int
    nbytes: int | None
    how: str


def time_device(run: Callable[[], object], repeats: int, before: Callable[[int], object] | None = None) -> Timing:
    """Time ``repeats`` runs, each between its own events, after three that do not count.

    before: called with the number of the repeat ahead of its first event, to change inputs off the clock; ahead of the
    runs that do not count too, since a run may move its own inputs on.
    """
    for i in range(3):
        if before is not None:
            before(i)
        run()
    torch.cuda.synchronize()
    taken = []
    for i in range(repeats):
        if before is not None:
            before(i)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return Timing(tuple(sorted(taken)))


def device_events(run: Callable[[], object]) -> list[Any]:
    """What the profiler says the GPU did in one run, in order of its start."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    return sorted(events, key=lambda e: e.time_range.start)


def median_ms(run: Callable[[], object], repeats: int = 50) -> float:
    """Median of :func:`time_device`."""
    return time_device(run, repeats).median


def us_in_chain(capture: Callable[[int], torch.cuda.CUDAGraph], repeats: int) -> float:
    """Microseconds of work where it follows itself; ``capture`` makes a graph of it so many times over.

    The medians of a graph with it a number of times and of one with it twice as often are subtracted, so that what it
    costs to start a graph is left out. The number is such that noise of a few microseconds does not matter.
    BackendError where the longer graph takes no longer: something else keeps the GPU busy.
    """
    once = median_ms(capture(1).replay, repeats)
    times = min(_MOST_TIMES, max(1, math.ceil(_LEAST_MS / max(once, 1e-3))))
    graphs = [capture(n) for n in (times, 2 * times)]
    for _ in range(_TRIES):
        few, many = (median_ms(graph.replay, repeats) for graph in graphs)
        if many > few:
            return (many - few) / times * 1e3
    raise BackendError(
        f"a chain of launches takes {few:.3f} ms, and {many:.3f} ms twice over: other work keeps this GPU busy",
        remedy="measure on an idle GPU",
    )
