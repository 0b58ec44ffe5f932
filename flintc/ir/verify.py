"""The invariants of a graph, each a small check that yields what it finds broken.

A fused graph computes what the unfused one does because passes never change an op; these checks hold everything
else that this rests on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flintc.errors import VerificationError
from flintc.ir.crossings import illegal_crossing
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.ops import OPS, OpTypeError, infer
from flintc.ir.printer import annotated

#: Kinds of value that a launch may read before the launches before it have finished (GPU rule: never what a step makes;
#: of a cache only pages that no launch of the step writes).
PREFETCHABLE = ("weight", "table", "cache")


@dataclass(frozen=True, slots=True)
class Issue:
    """One broken invariant; ``at`` is the op or launch it concerns (None: the graph as a whole)."""

    at: str | None
    message: str


def verify(graph: Graph) -> None:
    """Raise :class:`VerificationError` unless ``graph`` keeps every invariant of the IR.

    The message shows the launches concerned with each complaint under its op.
    """
    issues = find_issues(graph)
    if issues:
        count = "one invariant is" if len(issues) == 1 else f"{len(issues)} invariants are"
        first = issues[0].message if issues[0].at is None else f"{issues[0].at}: {issues[0].message}"
        notes: dict[str | None, list[str]] = {}
        for issue in issues:
            notes.setdefault(issue.at, []).append(issue.message)
        raise VerificationError(f"graph {graph.name}: {count} broken: {first}\n{annotated(graph, notes)}")


def find_issues(graph: Graph) -> list[Issue]:
    """Everything wrong with ``graph``. Checks that build on sound ops are left out where the ops are not."""
    issues: list[Issue] = []
    for stage in _STAGES:
        for check in stage:
            issues.extend(check(graph))
        if issues:
            break
    return issues


def _names(graph: Graph) -> Iterator[Issue]:
    """Keys are names, every value read or made is declared, and made at most once."""
    for key, op in graph.ops.items():
        if key != op.name:
            yield Issue(key, f"op {op.name} is stored under the name {key}")
        for v in (*op.inputs, *op.outputs):
            if v not in graph.values:
                yield Issue(key, f"value {v} is not declared")
    for key, value in graph.values.items():
        if key != value.name:
            yield Issue(None, f"value {value.name} is stored under the name {key}")
    made = Counter(v for op in graph.ops.values() for v in op.outputs)
    for op in graph.ops.values():
        for v in op.outputs:
            if made[v] > 1:
                yield Issue(op.name, f"{v} is made {made[v]} times")
    for v in graph.outputs:
        if v not in made:
            yield Issue(None, f"output {v} is made by no op")


def _definitions(graph: Graph) -> Iterator[Issue]:
    """Activations are made by an op, given values by none, and ops come after what they read."""
    seen = {name for name, v in graph.values.items() if name not in graph.producers}
    for value in graph.values.values():
        given = value.name not in graph.producers
        if value.kind == "activation" and given:
            yield Issue(next(iter(graph.consumers[value.name]), None), f"{value.name} is made by no op")
        if value.kind in ("input", "weight", "table") and not given:
            yield Issue(graph.producers[value.name], f"{value.name} is a given {value.kind}; an op may not make it")
    for op in graph.ops.values():
        for v in op.inputs:
            if v not in seen:
                yield Issue(op.name, f"{v} is read before it is made")
        seen.update(op.outputs)


def _types(graph: Graph) -> Iterator[Issue]:
    """Every op is known, carries exactly its attributes, and its outputs have the types it infers."""
    sound: set[object] = set()  # ops of one layer are those of the next: each kind of them is looked at once
    for op in graph.ops.values():
        types = [tuple(graph.values[v].type for v in ports) for ports in (op.inputs, op.outputs)]
        like = (op.kind, *types, repr(op.attrs))
        if like not in sound:
            errors = [Issue(op.name, m) for m in _type_errors(graph, op)]
            yield from errors
            if not errors:
                sound.add(like)


def _type_errors(graph: Graph, op: Op) -> Iterator[str]:
    if op.kind not in OPS:
        yield f"there is no op {op.kind}"
        return
    expected = OPS[op.kind].attrs
    if set(op.attrs) != set(expected):
        yield f"attributes are {sorted(op.attrs)}, {op.kind} has {sorted(expected)}"
        return
    try:
        inferred = infer(op.kind, tuple(graph.values[v].type for v in op.inputs), op.attrs)
    except OpTypeError as error:
        yield str(error)
        return
    if len(inferred) != len(op.outputs):
        yield f"{op.kind} makes {len(inferred)} values, {len(op.outputs)} are named"
    for v, t in zip(op.outputs, inferred, strict=False):
        if graph.values[v].type != t:
            yield f"{v} is declared {graph.values[v].type}, {op.kind} makes {t}"


def _partition(graph: Graph) -> Iterator[Issue]:
    """Each op is in exactly one launch; launch names are unique."""
    held = Counter(o for launch in graph.launches for o in launch.ops)
    for launch in graph.launches:
        if not launch.ops:
            yield Issue(launch.name, "the launch has no op")
        for o in launch.ops:
            if o not in graph.ops:
                yield Issue(launch.name, f"there is no op named {o}")
            elif held[o] > 1:
                yield Issue(o, f"the op is in {held[o]} launches")
    for o in graph.ops:
        if o not in held:
            yield Issue(o, "the op is in no launch")
    for name, count in Counter(launch.name for launch in graph.launches).items():
        if count > 1:
            yield Issue(name, f"{count} launches have this name")


def _order(graph: Graph) -> Iterator[Issue]:
    """The launch graph has no cycle, and launches, and the ops in each, come after what they read."""
    late = list(_late(graph))
    if late and (cycle := _cycle(graph)):
        yield Issue(cycle[0], f"launches wait for each other: {' -> '.join([*cycle, cycle[0]])}")
    else:
        yield from late


def _late(graph: Graph) -> Iterator[Issue]:
    made: set[str] = set()
    for launch in graph.launches:
        for o in launch.ops:
            for v in graph.ops[o].inputs:
                if v in graph.producers and v not in made:
                    yield Issue(o, f"{v} is made by {graph.producers[v]}, which is launched later")
            made.update(graph.ops[o].outputs)


def _cycle(graph: Graph) -> list[str]:
    """Launches that wait for each other in a ring, if there are any."""
    import networkx as nx

    if nx.is_directed_acyclic_graph(graph.launch_graph):
        return []
    return [a for a, _ in nx.find_cycle(graph.launch_graph)]


def _crossings(graph: Graph) -> Iterator[Issue]:
    """Every value that crosses inside a launch states how, once, and in a way that can work."""
    for launch in graph.launches:
        inner = graph.inner_values(launch)
        stated = Counter(c.value for c in launch.crossings)
        for v in inner:
            if v not in stated:
                yield Issue(graph.producers[v], f"{v} stays inside launch {launch.name}; how it crosses is not stated")
        for v, count in stated.items():
            if v not in inner:
                yield Issue(launch.name, f"{v} does not cross inside this launch; its crossing is stale")
            elif count > 1:
                yield Issue(graph.producers[v], f"the crossing of {v} is stated {count} times")
        yield from _illegal(graph, launch, inner)


def _illegal(graph: Graph, launch: Launch, inner: tuple[str, ...]) -> Iterator[Issue]:
    for crossing in launch.crossings:
        if crossing.value in inner:
            reason = illegal_crossing(graph, launch, crossing)
            if reason is not None:
                yield Issue(
                    graph.producers[crossing.value], f"{crossing.value} cannot cross by {crossing.kind}: {reason}"
                )


def _caches(graph: Graph) -> Iterator[Issue]:
    """Versions of a cache share memory: each has one successor, and nothing reads it once that is being written."""
    at = {o: i for i, launch in enumerate(graph.launches) for o in launch.ops}
    for value in graph.values.values():
        if value.kind != "cache":
            continue
        readers = [graph.ops[o] for o in graph.consumers[value.name]]
        writers = [op for op in readers if op.kind == "kv_write"]
        for extra in writers[1:]:
            yield Issue(extra.name, f"{value.name} has a successor already, written by {writers[0].name}")
        for writer in writers[:1]:
            for op in readers:
                if op.kind != "kv_write" and at[op.name] >= at[writer.name]:
                    yield Issue(op.name, f"{value.name} is read when {writer.name} may have overwritten it")
            if value.name in graph.outputs:
                yield Issue(writer.name, f"{value.name} is an output, and is overwritten here")


def _dependents(graph: Graph) -> Iterator[Issue]:
    """Dependent launch is for every launch or for none; above its wait a launch reads only what is complete by then."""
    chained = [launch for launch in graph.launches if launch.dependent is not None]
    if not chained:
        return
    made = {v: at for at, launch in enumerate(graph.launches) for o in launch.ops for v in graph.ops[o].outputs}
    for at, launch in enumerate(graph.launches):
        if launch.dependent is None:
            yield Issue(launch.name, "it does not wait, so nothing after it can rely on what came before it")
            continue
        if launch.dependent.alone is not None and launch.dependent.alone.alone is not None:
            yield Issue(launch.name, "a step of one row has no fewer rows")
        messages = [m for alone in (False, True) for m in _fetched_too_early(graph, at, alone, made)]
        yield from (Issue(launch.name, m) for m in dict.fromkeys(messages))
    first = graph.launches[0]
    if first.dependent is not None and "early" in (first.dependent.trigger, first.dependent.of_one_row.trigger):
        why = "positions and tables may still be being written"
        yield Issue(first.name, f"the first launch triggers below its wait: {why}")


def _fetched_too_early(graph: Graph, at: int, alone: bool, made: Mapping[str, int]) -> Iterator[str]:
    """Why the launch at ``at`` may not fetch above its wait what it is to; ``made``: where each value is made."""
    launch, before = graph.launches[at], graph.launches[at - 1].dependent if at else None
    assert launch.dependent is not None
    # The launch starts at the trigger of the one before: below its wait, what came ahead of that one is complete.
    before = before and (before.of_one_row if alone else before)
    complete = at - 1 if before is not None and before.trigger != "early" else 0
    for v in (launch.dependent.of_one_row if alone else launch.dependent).prefetch:
        kind = graph.values[v].kind
        if v not in graph.reads(launch):
            yield f"it is to prefetch {v}, which it does not read"
        elif kind == "activation" and made[v] >= complete:
            yield f"{v} may not be prefetched: this step may still be to write it"
        elif kind not in (*PREFETCHABLE, "activation"):
            yield f"{v} may not be prefetched: it changes from step to step"


Check = Callable[[Graph], Iterator[Issue]]
_STAGES: tuple[tuple[Check, ...], ...] = (
    (_names,),
    (_definitions, _types, _partition),
    (_order,),
    (_crossings, _caches, _dependents),
)
