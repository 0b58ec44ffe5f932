"""Rules that hold of each launch by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from flintc.ir.graph import Graph
from flintc.ir.ops import OPS
from flintc.ir.plan import Effect, Kernel, Path, Plan, PlannedLaunch
from flintc.safety.access import Access, BoundLaunch
from flintc.safety.hazard import Hazard


def presence(plan: Plan) -> Iterator[Hazard]:
    """Rule ``launches``; without it no other makes sense."""
    held, expected = Counter(x.name for x in plan.launches), Counter(x.name for x in plan.graph.launches)
    for name in expected | held:
        if (held[name], expected[name]) != (1, 1):
            yield Hazard("launches", name, "", "", f"{held[name]} times in the plan, {expected[name]} in the graph")
    for launch in (*plan.launches, *(plan.sampler.launches if plan.sampler is not None else ())):
        yield from _fit(plan, launch)
    yield from _homes(plan)


def _fit(plan: Plan, launch: PlannedLaunch) -> Iterator[Hazard]:
    """The arguments of a launch fit its kernel, and the kernel states what it does through them."""
    kernel = plan.kernels.get(launch.kernel)
    if kernel is None or len(kernel.params) != len(launch.args):
        yield Hazard("launches", launch.name, "", "", f"its arguments do not fit a kernel {launch.kernel}")
        return
    if not kernel.paths:
        yield Hazard("launches", launch.name, "", "", f"kernel {kernel.name} does not state its effects")
    several = plan.kernels.get(kernel.several) if kernel.several is not None else None
    if kernel.several is not None and not _alike(kernel, several):
        message = f"kernel {kernel.several} is to run in place of {kernel.name}, and does not fit its launches"
        yield Hazard("launches", launch.name, "", "", message)
    kinds = {p.name: a.kind for p, a in zip(kernel.params, launch.args, strict=True)}
    for one in (kernel, *([several] if several is not None else [])):
        for param in sorted({p for path in one.paths for e in path for p in (e.param, *e.last, *e.guards) if p}):
            if kinds.get(param, "symbol") == "symbol":
                message = f"kernel {one.name} follows {param}, which is no pointer"
                yield Hazard("launches", launch.name, "", "", message)


def _alike(kernel: Kernel, other: Kernel | None) -> bool:
    """Whether ``other`` takes what ``kernel`` is given, for the same sizes, and states its effects."""
    if other is None or not other.paths or _sizes(kernel) != _sizes(other):
        return False
    expected = replace(
        kernel, name=other.name, source=other.source, paths=other.paths, constants=other.constants,
        max_registers=other.max_registers, several=None,
    )  # fmt: skip
    return other == expected


def _sizes(kernel: Kernel) -> Mapping[str, int | float | bool]:
    """The kernel's constants but for how much of K it takes at a time."""
    return {name: value for name, value in kernel.constants.items() if name not in ("STEPS", "EVEN")}


def _homes(plan: Plan) -> Iterator[Hazard]:
    """Activations live in buffers, everything else in memory of its own."""
    for name in dict.fromkeys(a.ref for x in plan.launches for a in x.args if a.kind == "value"):
        if plan.graph.values[name].kind == "activation" and name not in plan.placement:
            yield Hazard("launches", "", name, "", f"{name} is passed to a launch but has no buffer")
    for name, buffer in plan.placement.items():
        if (kind := plan.graph.values[name].kind) != "activation":
            yield Hazard("launches", "", name, buffer, f"{name}, which is given as {kind}, is placed in {buffer}")


def attribute(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rule ``attribute``."""
    waits_somewhere = any(e.kind == "wait" for path in bound.kernel.paths for e in path)
    if bound.kernel.waits and not waits_somewhere:
        message = f"it has the attribute, but its kernel {bound.kernel.name} never waits"
        yield Hazard("attribute", bound.name, "", "", message)
    if waits_somewhere and not bound.kernel.waits:
        message = f"its kernel {bound.kernel.name} waits, but it lacks the attribute"
        yield Hazard("attribute", bound.name, "", "", message)


def waits(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rules ``wait-once`` and ``store-above-wait``."""
    if not bound.kernel.waits:
        return
    for number, path in enumerate(bound.kernel.paths):
        found = [e for e in path if e.kind == "wait"]
        if len(found) == 1 and found[0].sure:
            continue
        how = "waits in a loop or under a condition" if len(found) == 1 else f"waits {len(found)} times"
        yield Hazard("wait-once", bound.name, "", "", f"path {number} of its kernel {bound.kernel.name} {how}")
    for access in bound.accesses:
        if access.above and access.writes:
            message = f"it stores to {access.value} in {access.place} above its wait"
            yield Hazard("store-above-wait", bound.name, access.value, access.place, message)


def binding(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rule ``operands``."""
    graph, launch = plan.graph, bound.launch
    made = {v for o in launch.ops for v in graph.ops[o].outputs}
    needed = {v for v in graph.reads(launch) if not _only_extended(graph, bound, v)}
    read = {a.value for a in bound.accesses if a.effect.kind == "read"}
    written = {a.value for a in bound.accesses if a.effect.kind == "write"}
    whole = {a.value for a in bound.accesses if a.effect.kind == "read" and not a.effect.earlier}
    for value in sorted(needed - whole):
        yield _operand(bound, value, f"it never reads {value}, an input of its ops")
    for value in sorted(read - made - set(graph.reads(launch))):
        yield _operand(bound, value, f"it reads {value}, which none of its ops does")
    for value in sorted((read & made) - written):
        yield _operand(bound, value, f"it reads {value} before anyone makes it")
    for value in sorted(set(graph.writes(launch)) - written):
        yield _operand(bound, value, f"it never writes {value}, an output of its ops")
    for value in sorted(written - made):
        yield _operand(bound, value, f"it writes {value}, which none of its ops makes")


def sampling(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rule ``operands`` after the step: its outputs are read, and what the next step is given is written."""
    for access in bound.accesses:
        value = plan.graph.values.get(access.value)
        given = value is None or value.kind == "input"
        if access.writes and not given:
            yield _operand(bound, access.value, f"it writes {access.value}, which is not given to the next step")
        elif not given and access.value not in plan.graph.outputs:
            yield _operand(bound, access.value, f"it reads {access.value}, which is no output of the step")


def _operand(bound: BoundLaunch, value: str, message: str) -> Hazard:
    return Hazard("operands", bound.name, value, bound.places.get(value, value), message)


def _only_extended(graph: Graph, bound: BoundLaunch, value: str) -> bool:
    """Whether ``value`` is a cache that the launch writes a next version of, in place, and does not read."""
    readers = [graph.ops[o] for o in bound.launch.ops if value in graph.ops[o].inputs]
    return graph.values[value].kind == "cache" and all(op.kind == "kv_write" for op in readers)


def inside(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rule ``inside-launch``: programs run in no order, save that a last arriver comes after all who arrived."""
    yield from _unread(bound)
    yield from _unfinished(bound)
    by_place: dict[str, list[Access]] = {}
    for access in bound.accesses:
        if access.effect.kind in ("read", "write"):
            by_place.setdefault(access.place, []).append(access)
    told: set[tuple[str, str]] = set()
    for accesses in by_place.values():
        for x, y in combinations(accesses, 2):
            if not _conflict(x, y) or _ordered(bound, x, y) or _ordered(bound, y, x):
                continue
            if (x.value, y.value) not in told:
                told |= {(x.value, y.value), (y.value, x.value)}
                yield _race_inside(bound, x, y)


def _unread(bound: BoundLaunch) -> Iterator[Hazard]:
    """Stores of programs that have not read what a last arriver read to make them."""
    read: list[Access] = []
    for access in bound.accesses:
        read = [r for r in read if r.path == access.path]
        if access.effect.kind == "read" and access.effect.last:
            read.append(access)
        elif access.effect.kind == "write":
            missed = next((r for r in read if access.effect.last[: len(r.effect.last)] != r.effect.last), None)
            if missed is not None:
                counter = bound.value(missed.effect.last[-1])
                message = (
                    f"it writes {access.value} whether or not it arrived last at {counter} and read {missed.value}"
                )
                yield Hazard("inside-launch", bound.name, access.value, access.place, message)


def _unfinished(bound: BoundLaunch) -> Iterator[Hazard]:
    """Loads, by others than the last arriver, of what the programs that arrive together make."""
    written = {access.place for access in bound.accesses if access.effect.kind == "write"}
    for access in bound.accesses:
        if access.effect.kind != "read" or access.place not in written:
            continue
        before = bound.kernel.paths[access.path][: access.at]
        missed = next((e.param for e in before if e.kind == "arrive" and e.param not in access.effect.last), None)
        if missed is not None:
            message = f"it reads {access.value} whether or not it arrived last at {bound.value(missed)}"
            yield Hazard("inside-launch", bound.name, access.value, access.place, message)


def _conflict(x: Access, y: Access) -> bool:
    """Whether the order of two accesses to one place matters. Which part of a value a program writes is its own."""
    if x.writes and y.writes:
        return x.value != y.value
    return x.writes or y.writes


def _ordered(bound: BoundLaunch, x: Access, y: Access) -> bool:
    """Whether ``x`` in any program comes before ``y`` in any program that shares their memory."""
    if x.effect.last == y.effect.last and x.path == y.path and x.effect.last:
        return x.at < y.at  # one program of the group does both
    path = bound.kernel.paths[x.path]
    return any(_arrives(path[x.at + 1 :], y.effect.last[: depth + 1], x) for depth in range(len(y.effect.last)))


def _arrives(after: Path, chain: tuple[str, ...], x: Access) -> bool:
    """Whether the program of ``x`` goes on to arrive at the last counter of ``chain``, having come through the rest."""
    *through, counter = chain
    comes_along = tuple(through[: len(x.effect.last)]) == x.effect.last
    return comes_along and any(e.kind == "arrive" and e.param == counter and e.last == tuple(through) for e in after)


def _race_inside(bound: BoundLaunch, x: Access, y: Access) -> Hazard:
    write, other = (x, y) if x.writes else (y, x)
    does = "writes" if other.writes else "reads"
    one = f"one program writes {write.value} in {write.place} while another {does} {other.value} there"
    return Hazard("inside-launch", bound.name, write.value, write.place, one)


def counters(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rule ``counter``."""
    used = {e.param for path in bound.kernel.paths for e in path if e.kind in ("arrive", "reset")}
    named = {c for path in bound.kernel.paths for e in path for c in e.last}
    scratch = [p for p, a in bound.args.items() if a.kind == "scratch" and (p in used or a.ref in plan.scratch)]
    for param in sorted(used | named):
        if bound.args[param].kind != "scratch":
            yield _counter(bound, param, f"{param} counts arrivals but is no counter")
    refs = Counter(bound.value(p) for p in scratch)
    for ref in sorted(r for r, n in refs.items() if n > 1):
        yield Hazard("counter", bound.name, ref, ref, f"counter {ref} serves two groups at once")
    for access in bound.accesses:
        if access.effect.kind in ("read", "write") and access.effect.param in scratch:
            yield _counter(bound, access.effect.param, f"counter {access.value} is accessed as if it were a value")
    for path in bound.kernel.paths:
        yield from _arrivals(bound, path)


def _arrivals(bound: BoundLaunch, path: Path) -> Iterator[Hazard]:
    """Arrivals of one path: each counter once, put back by its last arriver, whose work comes after."""
    arrived: dict[str, Effect] = {}
    for at, effect in enumerate(path):
        if effect.kind == "arrive":
            if effect.param in arrived:
                yield _counter(bound, effect.param, f"a program arrives twice at counter {bound.value(effect.param)}")
            arrived[effect.param] = effect
            if not any(_puts_back(later, effect) for later in path[at + 1 :]):
                message = f"the last arriver does not put counter {bound.value(effect.param)} back to zero"
                yield _counter(bound, effect.param, message)
        elif effect.kind == "reset" and not (effect.param in arrived and _puts_back(effect, arrived[effect.param])):
            message = f"counter {bound.value(effect.param)} is reset by others than its last arriver"
            yield _counter(bound, effect.param, message)
        for counter in effect.last:
            if counter not in arrived:
                message = f"something is done by the last arriver at {bound.value(counter)} before it arrived"
                yield _counter(bound, counter, message)


def _puts_back(reset: Effect, arrival: Effect) -> bool:
    same = reset.kind == "reset" and reset.param == arrival.param and reset.last == arrival.last
    return same and arrival.param in reset.guards


def _counter(bound: BoundLaunch, param: str, message: str) -> Hazard:
    ref = bound.value(param)
    return Hazard("counter", bound.name, ref, ref, message)


def padding(plan: Plan, bound: BoundLaunch) -> Iterator[Hazard]:
    """Rule ``padding``: a padded row has sequence -1, which names no page, and experts -1, which name no weight."""
    paged = _at_port(plan.graph, bound, "block_table")
    paged |= {a.ref for a in bound.planned.args if a.kind == "value" and plan.graph.values[a.ref].kind == "cache"}
    yield from _unguarded(bound, paged, _at_port(plan.graph, bound, "seqs"), "sequence slot")
    experts = _at_port(plan.graph, bound, "weight", of="expert_linear")
    yield from _unguarded(bound, experts, _at_port(plan.graph, bound, "ids", of="expert_linear"), "expert")


def _unguarded(bound: BoundLaunch, values: set[str], indices: set[str], what: str) -> Iterator[Hazard]:
    """Accesses to ``values`` that do not depend on what ``indices`` hold."""
    told: set[str] = set()
    for access in bound.accesses:
        guarded = any(bound.value(g) in indices for g in access.effect.guards)
        if access.value in values and not guarded and access.value not in told:
            told.add(access.value)
            does = "writes" if access.writes else "reads"
            message = f"it {does} {access.value} for rows whatever their {what} is, padded ones included"
            yield Hazard("padding", bound.name, access.value, access.place, message)


def _at_port(graph: Graph, bound: BoundLaunch, port: str, of: str | None = None) -> set[str]:
    """Values that the launch's ops, or those of kind ``of``, read at ``port``."""
    return {
        value
        for op in (graph.ops[o] for o in bound.launch.ops)
        if of in (None, op.kind)
        for name, value in zip(OPS[op.kind].inputs, op.inputs, strict=False)
        if name == port
    }
