"""A graph as text: launches as groups of ops, ports by name, values with their types, like layers folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from flintc.errors import UsageError
from flintc.ir.cost import evaluations
from flintc.ir.crossings import ports_reading
from flintc.ir.graph import Attr, Dependent, Graph, Launch, Op
from flintc.ir.ops import OPS

#: Complaints by the op or launch they concern; None for the graph as a whole.
Notes = Mapping[str | None, list[str]]

#: Characters of an op that fit on one line.
_WIDTH = 112

_HEADINGS = {"input": "inputs", "table": "tables"}


def to_text(graph: Graph, layer: int | None = None) -> str:
    """The whole graph with each run of like layers printed once, or every launch of one ``layer``."""
    if layer is not None:
        need_layer(graph, layer)
        return "\n".join(_layer_block(graph, layer, [layer])) + "\n"
    lines = [title(graph), *_given(graph)]
    before, after = _outside(graph)
    lines += _section("before the layers", graph, before, None)
    for layers in like_layers(graph):
        lines += ["", *_layer_block(graph, layers[0], layers)]
    lines += _section("after the layers", graph, after, None)
    return "\n".join(lines) + "\n"


def annotated(graph: Graph, notes: Notes) -> str:
    """The launches that ``notes`` concern, each complaint under its op; the rest of the graph is left out."""
    lines = [title(graph), *(f"  ^ {note}" for note in notes.get(None, []))]
    shown = 0
    for launch in graph.launches:
        if any(name in notes for name in (launch.name, *launch.ops)):
            lines += launch_lines(graph, launch, None, notes)
            shown += 1
    homeless = [o for o in graph.ops if o in notes and o not in graph.launch_of]
    for name in homeless:
        lines += [*_op_lines(graph, graph.ops[name], None, " "), *(f"         ^ {note}" for note in notes[name])]
    hidden = len(graph.launches) - shown
    return "\n".join([*lines, *([f"  ({hidden} sound launches are not shown)"] if hidden else [])])


def need_layer(graph: Graph, layer: int) -> None:
    """UsageError unless ``graph`` has this layer."""
    layers = list(graph.layers())
    if layer not in layers:
        has = f"it has layers {layer_ranges(layers)}" if layers else "it has none"
        raise UsageError(f"{graph.name} has no layer {layer}", remedy=has)


def like_layers(graph: Graph) -> list[list[int]]:
    """Layers grouped by equal structure (names of values and layers aside), in order of first appearance."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer in graph.layers():
        groups.setdefault(_fingerprint(graph, layer), []).append(layer)
    return list(groups.values())


def layer_ranges(layers: Iterable[int]) -> str:
    """``2-4, 6-8, 10``: layer numbers with runs joined."""
    runs: list[list[int]] = []
    for n in sorted(layers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def title(graph: Graph) -> str:
    """One line: the name, and how many launches serve how many ops."""
    head = len(graph.launches) - len(graph.body)
    apart = f" and {_count(head, 'launch')} of the head" if head else ""
    return f"graph {graph.name}: {_count(len(graph.body), 'launch')}{apart}, {_count(len(graph.ops), 'op')}"


def launch_lines(graph: Graph, launch: Launch, layer: int | None, notes: Notes | None = None) -> Iterator[str]:
    """One launch: its role and chaining, then its ops. Names lose the prefix of ``layer``.

    With ``notes`` the graph may be broken, and nothing is derived from it.
    """
    name = _short(launch.name, layer)
    role = "" if name == launch.role else f"  [{launch.role}]"
    yield f"  {name}{role}{_tile(launch)}{_chained(launch, layer)}"
    if launch.dependent is not None and launch.dependent.alone is not None:
        yield f"    for one row: {_order(launch.dependent.alone, layer)}"
    known = [o for o in launch.ops if o in graph.ops]
    if launch.name not in known:
        yield from (f"  ^ {note}" for note in (notes or {}).get(launch.name, []))
    bar = "│" if len(launch.ops) > 1 else " "
    for o in known:
        yield from _op_lines(graph, graph.ops[o], layer, bar)
        crossings = _crossing_lines(graph, launch, graph.ops[o], layer, derive=notes is None)
        yield from (f"   {bar}     ~ {line}" for line in crossings)
        yield from (f"   {bar}     ^ {note}" for note in (notes or {}).get(o, []))


def _layer_block(graph: Graph, layer: int, layers: list[int]) -> Iterator[str]:
    launches = graph.layer_launches(layer)
    alike = f" (like it: {layer_ranges(layers[1:])})" if len(layers) > 1 else ""
    yield f"layer {layer}{alike}: {_count(len(launches), 'launch')}"
    for launch in launches:
        yield from launch_lines(graph, launch, layer)


def _section(heading: str, graph: Graph, launches: tuple[Launch, ...], layer: int | None) -> Iterator[str]:
    if launches:
        yield from ("", f"{heading}: {_count(len(launches), 'launch')}")
        for launch in launches:
            yield from launch_lines(graph, launch, layer)


def _outside(graph: Graph) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
    """Launches of no layer: those before the first layer, and the others."""
    loose = graph.layer_launches(None)
    inside = [i for i, x in enumerate(graph.launches) if graph.ops[x.ops[0]].layer is not None]
    first = inside[0] if inside else len(graph.launches)
    before = tuple(x for x in loose if x in graph.launches[:first])
    return before, loose[len(before) :]


def _given(graph: Graph) -> Iterator[str]:
    for kind, heading in _HEADINGS.items():
        values = [f"{v.name} {v.type}" for v in graph.values.values() if v.kind == kind]
        if values:
            yield f"  {heading}  {', '.join(values)}"
    made = [f"{v} {_type(graph, v)}" for v in graph.outputs if not _is_cache(graph, v)]
    caches = ["the next version of every cache"] if len(made) < len(graph.outputs) else []
    yield f"  makes   {', '.join([*made, *caches])}"


def _op_lines(graph: Graph, op: Op, layer: int | None, bar: str) -> Iterator[str]:
    """``y bf16[B, 8] = norm(x=sum, weight=w.norm f32[8])  eps=1e-06``, on two lines where one would be too long."""
    made = ", ".join(f"{_short(v, layer)} {_type(graph, v)}" for v in op.outputs)
    call = f"{op.kind}({_arguments(graph, op, layer)}){_attributes(op)}"
    if len(made) + len(call) <= _WIDTH:
        yield f"   {bar} {made} = {call}"
    else:
        yield f"   {bar} {made} ="
        yield f"   {bar}     {call}"


def _arguments(graph: Graph, op: Op, layer: int | None) -> str:
    parts = []
    for v in dict.fromkeys(op.inputs):
        ports = "=".join(ports_reading(op, v)) if op.kind in OPS else "?"
        weight = v in graph.values and graph.values[v].kind == "weight"
        parts.append(f"{ports}={_short(v, layer)}" + (f" {_type(graph, v)}" if weight else ""))
    return ", ".join(parts)


def _attributes(op: Op) -> str:
    """Attributes that differ from their defaults."""
    defaults = OPS[op.kind].attrs if op.kind in OPS else {}
    given = [f"{k}={_attribute(v)}" for k, v in op.attrs.items() if k not in defaults or defaults[k] != v]
    return "  " + " ".join(given) if given else ""


def _attribute(value: Attr) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _crossing_lines(graph: Graph, launch: Launch, op: Op, layer: int | None, derive: bool) -> Iterator[str]:
    """How the outputs of ``op`` that stay inside cross, like ones together.

    ``derive``: also how often they are evaluated, and whether they are written besides.
    """
    alike: dict[str, list[str]] = {}
    for crossing in launch.crossings:
        if crossing.value in op.outputs:
            how = f"{crossing.kind} by {crossing.group}" if crossing.group else crossing.kind
            if derive and crossing.kind == "recompute":
                how += f" x{evaluations(graph, launch, op.name)}"
            if derive and crossing.value in graph.writes(launch):
                how += ", and written"
            alike.setdefault(how, []).append(_short(crossing.value, layer))
    for how, values in alike.items():
        yield f"{', '.join(values)}: {how}"


def _chained(launch: Launch, layer: int | None) -> str:
    if launch.dependent is None:
        return ""
    return f"  {_order(launch.dependent, layer)}"


def _order(dependent: Dependent, layer: int | None) -> str:
    """What stands above the wait, and where the trigger does."""
    names = [_short(v, layer) for v in dependent.prefetch]
    first = f"fetch {', '.join(names)}; " if names else ""
    return f"{first}wait; trigger {dependent.trigger}"


def _tile(launch: Launch) -> str:
    return f"  {launch.tile} rows a program" if launch.tile else ""


def _type(graph: Graph, value: str) -> str:
    return str(graph.values[value].type) if value in graph.values else "?"


def _is_cache(graph: Graph, value: str) -> bool:
    return value in graph.values and graph.values[value].kind == "cache"


def _short(name: str, layer: int | None) -> str:
    return name if layer is None else name.removeprefix(f"L{layer}.")


def _count(n: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{n:,} {noun if n == 1 else plural}"


def _fingerprint(graph: Graph, layer: int) -> tuple[str, ...]:
    """The text of a layer with its own names short and values from elsewhere named by order and type."""
    own = {v for launch in graph.layer_launches(layer) for o in launch.ops for v in graph.ops[o].outputs}
    foreign: dict[str, str] = {}
    lines = []
    for launch in graph.layer_launches(layer):
        for o in launch.ops:
            for v in graph.ops[o].inputs:
                if v not in own and graph.values[v].kind == "activation":
                    foreign.setdefault(v, f"<{len(foreign)} {graph.values[v].type}>")
        lines += [_replace(line, foreign) for line in launch_lines(graph, launch, layer)]
    return tuple(lines)


def _replace(line: str, names: Mapping[str, str]) -> str:
    for name, stand_in in names.items():
        for end in (",", ")"):
            line = line.replace(f"={name}{end}", f"={stand_in}{end}")
    return line
