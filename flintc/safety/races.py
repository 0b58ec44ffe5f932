"""Accesses of different launches to one memory: ordered by waits between them, or a race."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flintc.ir.plan import Plan
from flintc.safety.access import Access, BoundLaunch, places
from flintc.safety.hazard import Hazard
from flintc.safety.order import CALLER, Complete, bit, completions

#: Kinds of value that nothing writes from the first step to the last.
_CONSTANT = ("weight", "table")


def races(plan: Plan, bound: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """Rules ``load-above-wait`` and ``order``, over every pair of launches.

    The caller counts as having touched all memory that is not constant: it wrote the inputs, and the steps before this
    one left their traces in buffers, caches and counters.

    A read that leaves out what this step writes of a cache is in nobody's way but the caller's.
    """
    rows, readers, writers = _rows_written(plan), dict[str, int](), dict[str, int]()
    for index, (launch, complete) in enumerate(zip(bound, completions(b.kernel for b in bound), strict=True)):
        told: set[tuple[str, str]] = set()
        for access in launch.accesses:
            if access.effect.earlier and _leaves_out(rows, launch, access):
                before = CALLER
            else:
                before = _conflicting(plan, access, readers, writers)
            running = before & ~(complete.at_start if access.above else complete.below_wait)
            if running and (access.place, access.effect.kind) not in told:
                told.add((access.place, access.effect.kind))
                yield _hazard(bound, launch, access, running, complete)
        for access in launch.accesses:
            touched = writers if access.writes else readers
            touched[access.place] = touched.get(access.place, 0) | bit(index)


def _conflicting(plan: Plan, access: Access, readers: dict[str, int], writers: dict[str, int]) -> int:
    """Launches before that must be complete when ``access`` comes."""
    value = plan.graph.values.get(access.value)
    if value is not None and value.kind in _CONSTANT and not access.writes:
        return writers.get(access.place, 0)
    touched = writers.get(access.place, 0) | CALLER
    return touched | readers.get(access.place, 0) if access.writes else touched


def _rows_written(plan: Plan) -> dict[str, set[tuple[str, ...]]]:
    """Of each cache's memory, the positions and sequences by which this step's ops write there."""
    where, found = places(plan), dict[str, set[tuple[str, ...]]]()
    for op in plan.graph.ops.values():
        if op.kind == "kv_write":
            found.setdefault(where.get(op.outputs[0], op.outputs[0]), set()).add(op.inputs[3:5])
    return found


def _leaves_out(rows: Mapping[str, set[tuple[str, ...]]], launch: BoundLaunch, access: Access) -> bool:
    """Whether what ``access`` leaves out of a cache are the positions that this step's ops write there.

    Which these are is told by all rows of the step, for which the launch has as many programs along its first axis.
    """
    told = tuple(launch.value(param) for param in access.effect.earlier)
    return launch.planned.grid[0] == "B" and rows.get(access.place) == {told}


def _hazard(
    bound: tuple[BoundLaunch, ...], launch: BoundLaunch, access: Access, running: int, complete: Complete
) -> Hazard:
    """The race with the latest of the launches that may be ``running``."""
    latest = running.bit_length() - 2
    other = "the caller or the step before" if latest < 0 else f"launch {bound[latest].name}"
    held = f"{access.value} in {access.place}" if access.value != access.place else access.value
    if access.above and not access.writes:
        message = f"it loads {held} above its wait, while {other} may be writing there"
        return Hazard("load-above-wait", launch.name, access.value, access.place, message)
    does = "writes" if access.writes else "reads"
    message = f"it {does} {held} while {other} may still be running: no wait in between holds it back"
    return Hazard("order", launch.name, access.value, access.place, message)
