"""What memory holds as the launches go by, and whether it is laid out for that."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from flintc.ir.build import RING_ROWS
from flintc.ir.graph import Op
from flintc.ir.plan import Plan
from flintc.ir.types import BITS, TensorType
from flintc.safety.access import BoundLaunch, places
from flintc.safety.hazard import Hazard


def content(plan: Plan, bound: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """Rule ``content``, with the launches taken one after the other: the rule ``order`` keeps them so."""
    where = places(plan)
    #: What each place holds, and who put it there.
    holds = {where.get(v.name, v.name): (v.name, "") for v in plan.graph.values.values() if v.kind != "activation"}
    holds |= {where[v.name]: (v.name, "") for v in plan.graph.values.values() if _is_first_version(plan, v.name)}
    for launch in bound:
        made = {v for o in launch.launch.ops for v in plan.graph.ops[o].outputs}
        for access in launch.accesses:
            if access.effect.kind == "read" and access.value not in made:
                yield from _missing(holds, access.value, access.place, launch.name)
        for before, place in _extended(plan, launch, where):
            yield from _missing(holds, before, place, launch.name)
        holds |= {a.place: (a.value, launch.name) for a in launch.accesses if a.effect.kind == "write"}
    for output in plan.graph.outputs:
        yield from _missing(holds, output, where.get(output, output), "")


def _is_first_version(plan: Plan, value: str) -> bool:
    return plan.graph.values[value].kind == "cache" and value not in plan.graph.producers


def _missing(holds: dict[str, tuple[str, str]], value: str, place: str, launch: str) -> Iterator[Hazard]:
    held, writer = holds.get(place, ("nothing", ""))
    if held != value:
        since = f" since launch {writer} wrote it" if writer else ""
        wants = "it reads" if launch else "the step should end with"
        yield Hazard("content", launch, value, place, f"{wants} {value} in {place}, which holds {held}{since}")


def _extended(plan: Plan, launch: BoundLaunch, where: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Cache versions that the launch makes the next versions of, and their memory."""
    for name in launch.launch.ops:
        op = plan.graph.ops[name]
        if op.kind == "kv_write":
            yield op.inputs[2], where[op.inputs[2]]


def capacity(plan: Plan, bound: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """Rule ``capacity``."""
    for value, buffer in plan.placement.items():
        type = plan.graph.values[value].type
        if not any(_covers(held, type) for held in plan.buffers[buffer].types):
            launch = next((b.name for b in bound if any(b.value(p) == value for p in b.args)), "")
            yield Hazard("capacity", launch, value, buffer, f"{value} is {type}, which {buffer} is not laid out for")


def _covers(held: TensorType, type: TensorType) -> bool:
    """Whether memory for ``held`` holds a ``type`` whatever the run-time symbols are."""
    factors = [[f for d in t.shape for f in str(d).split("*")] for t in (held, type)]
    symbols = [sorted(f for f in each if not f.isdigit()) for each in factors]
    bits = [
        BITS[t.dtype] * prod(int(f) for f in each if f.isdigit()) for t, each in zip((held, type), factors, strict=True)
    ]
    return symbols[0] == symbols[1] and bits[0] >= bits[1]


def rings(plan: Plan, bound: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """Rule ``ring``: a step writes up to RING_ROWS rows of a sequence before any of them attends."""
    writes = {op.outputs[0]: op for op in plan.graph.ops.values() if op.kind == "kv_write"}
    launch_of = {o: b.name for b in bound for o in b.launch.ops}
    for op in writes.values():
        yield from _small_ring(plan, op, launch_of[op.name])
    for op in plan.graph.ops.values():
        if op.kind == "attention_partial" and op.inputs[1] in writes:
            write = writes[op.inputs[1]]
            if (op.inputs[4], op.attrs["window"]) != (write.inputs[5], write.attrs["window"]):
                message = f"it finds pages by {op.inputs[4]}, {write.name} wrote them by {write.inputs[5]}"
                yield Hazard("ring", launch_of[op.name], op.inputs[1], write.inputs[2], message)


def _small_ring(plan: Plan, write: Op, launch: str) -> Iterator[Hazard]:
    window = write.attrs["window"]
    if not isinstance(window, int):
        return
    cache, table = write.inputs[2], write.inputs[5]
    (slots, *_, page, _), ring = plan.graph.values[cache].type.shape, plan.graph.values[table].type.shape[-1]
    if not isinstance(page, int) or not isinstance(ring, int) or slots not in (f"{ring}*Q", f"Q*{ring}"):
        message = f"{cache} has {slots} pages of {page}, {table} names rings of {ring}"
        yield Hazard("ring", launch, cache, cache, message)
    elif ring * page < window - 1 + RING_ROWS:
        message = (
            f"a ring of {ring} pages of {page} positions loses the oldest of a window of {window} "
            f"while {RING_ROWS} rows are written"
        )
        yield Hazard("ring", launch, cache, cache, message)
