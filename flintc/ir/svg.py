"""One layer as a drawing: launches as boxes, values as arrows. The SVG needs no other file and follows the theme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from flintc.ir.graph import Crossing, Graph, Launch
from flintc.ir.layout import Box, Layout, Point, place
from flintc.ir.printer import need_layer

#: Pixels: height of a line, widths of a character in a box and in an edge's label, space inside and around.
_LINE, _CHAR, _LABEL, _PAD, _MARGIN, _TITLE = 17.0, 6.7, 6.1, 12.0, 24.0, 44.0

_STYLE = """
svg { --ground: #fbfbf9; --ink: #1d2430; --soft: #6b7482; --box: #ffffff; --rim: #c9cfd8; --edge: #8a94a3;
      --launch: #2457a6; --cross: #a4501a; --pill: #eceff3; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #14171c; --ink: #e4e8ee; --soft: #98a2b1; --box: #1d222a; --rim: #3b4452; --edge: #75808f;
        --launch: #86b4ff; --cross: #f0a36b; --pill: #272d37; }
}
text { font: 11px ui-monospace, "SF Mono", Menlo, Consolas, monospace; fill: var(--ink); }
.ground { fill: var(--ground); }
.title { font-size: 15px; font-weight: 600; }
.soft { fill: var(--soft); }
.launch { fill: var(--launch); font-weight: 600; font-size: 12px; }
.cross { fill: var(--cross); }
.box { fill: var(--box); stroke: var(--rim); }
.pill { fill: var(--pill); stroke: none; }
.edge { fill: none; stroke: var(--edge); stroke-width: 1.2; }
.tip { fill: var(--edge); }
.value { fill: var(--soft); font-size: 10px; paint-order: stroke; stroke: var(--ground); stroke-width: 4px; }
"""


@dataclass(frozen=True, slots=True)
class _Text:
    """One line inside a box."""

    text: str
    style: str = ""
    indent: float = 0.0


def to_svg(graph: Graph, layer: int) -> str:
    """SVG text of one layer; UsageError where there is no such layer."""
    need_layer(graph, layer)
    launches = graph.layer_launches(layer)
    lines = {launch.name: _lines(graph, launch, layer) for launch in launches}
    values = _edges(graph, launches, layer)
    pills = {end: end.partition(":")[2] for edge in values for end in edge if end not in lines}
    sizes = {n: _size(x) for n, x in lines.items()} | {p: (_CHAR * len(t) + 2 * _PAD, 24.0) for p, t in pills.items()}
    layout = place(sizes, {edge: _LABEL * len(", ".join(names)) for edge, names in values.items()})
    parts = [
        *(_edge(layout.routes[edge], names) for edge, names in values.items()),
        *(_box(layout.boxes[name], texts) for name, texts in lines.items()),
        *(_pill(layout.boxes[name], text) for name, text in pills.items()),
    ]
    count = f"{len(launches)} launches" if len(launches) != 1 else "1 launch"
    return _document(layout, f"{graph.name}, layer {layer}", count, parts)


def _edges(graph: Graph, launches: Sequence[Launch], layer: int) -> dict[tuple[str, str], list[str]]:
    """Values by (source, target): launches of the layer, or ``in:value`` and ``out:value`` at its borders."""
    own = {launch.name for launch in launches}
    edges: dict[tuple[str, str], list[str]] = {}
    for launch in launches:
        for v in graph.reads(launch):
            if v in graph.producers:
                source = graph.launch_of[graph.producers[v]].name
                inside = source in own
                edge = (source if inside else f"in:{v}", launch.name)
                edges.setdefault(edge, []).extend([v.removeprefix(f"L{layer}.")] if inside else [])
        for v in graph.writes(launch):
            readers = {graph.launch_of[o].name for o in graph.consumers[v]}
            if graph.values[v].kind != "cache" and (v in graph.outputs or readers - own):
                edges.setdefault((launch.name, f"out:{v}"), [])
    return edges


def _lines(graph: Graph, launch: Launch, layer: int) -> list[_Text]:
    """What a box says: the launch, its ops with what they make, how inner values cross, the weights it reads."""

    def short(name: str) -> str:
        return name.removeprefix(f"L{layer}.")

    name = short(launch.name)
    head = name if launch.role in (name, "") else f"{name}  [{launch.role}]"
    lines = [_Text(head, "launch")]
    crossings = {c.value: c for c in launch.crossings}
    for o in launch.ops:
        op = graph.ops[o]
        made = ", ".join(f"{short(v)} {graph.values[v].type}" for v in op.outputs[:1])
        more = f", +{len(op.outputs) - 1}" if len(op.outputs) > 1 else ""
        lines.append(_Text(f"{op.kind} → {made}{more}"))
        lines += [_Text(t, "cross", 14.0) for t in _crossing_texts(crossings[v] for v in op.outputs if v in crossings)]
    weights = [short(v) for v in graph.reads(launch) if graph.values[v].kind == "weight"]
    if weights:
        lines.append(_Text(", ".join(weights), "soft"))
    return lines


def _crossing_texts(crossings: Iterable[Crossing]) -> list[str]:
    ways = (f"{c.kind} by {c.group}" if c.group else c.kind for c in crossings)
    return [f"↳ {way}" for way in dict.fromkeys(ways)]


def _size(lines: Sequence[_Text]) -> tuple[float, float]:
    width = max(_CHAR * len(x.text) * (1.1 if x.style == "launch" else 1.0) + x.indent for x in lines)
    return width + 2 * _PAD, _LINE * len(lines) + 1.2 * _PAD


def _box(box: Box, lines: Sequence[_Text]) -> str:
    x, y = box.x + _MARGIN, box.y + _MARGIN + _TITLE
    parts = [f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="7"/>']
    for i, line in enumerate(lines):
        at = y + 0.6 * _PAD + _LINE * (i + 0.72)
        parts.append(_words(x + _PAD + line.indent, at, line.text, line.style))
    return "\n".join(parts)


def _pill(box: Box, text: str) -> str:
    x, y = box.x + _MARGIN, box.y + _MARGIN + _TITLE
    rect = f'<rect class="pill" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="12"/>'
    return rect + _words(x + _PAD, y + 16, text, "soft")


def _words(x: float, y: float, text: str, style: str) -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" xml:space="preserve">{escape(text)}</text>'


def _edge(route: Sequence[Point], names: Sequence[str]) -> str:
    """A curve through ``route`` that leaves and arrives upright, and its values' names at its beginning."""
    points = [(x + _MARGIN, y + _MARGIN + _TITLE) for x, y in route]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    curve = f'<path class="edge" marker-end="url(#tip)" d="{path}"/>'
    label = _words(points[0][0] + 5, points[0][1] + 15, ", ".join(names), "value") if names else ""
    return curve + label


def _document(layout: Layout, title: str, note: str, parts: Sequence[str]) -> str:
    width, height = layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN + _TITLE
    width = max(width, 2 * _MARGIN + _CHAR * 1.4 * len(title) + _CHAR * len(note) + 20)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}: {note}">'
    )
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0.8 L8 4 L0 7.2 z"/></marker></defs>'
    )
    after = _MARGIN + _CHAR * 1.4 * len(title) + 16
    return "\n".join(
        [
            head,
            f"<style>{_STYLE}</style>",
            tip,
            f'<rect class="ground" width="{width:.0f}" height="{height:.0f}"/>',
            _words(_MARGIN, _MARGIN + 14, title, "title"),
            _words(after, _MARGIN + 14, note, "soft"),
            *parts,
            "</svg>",
            "",
        ]
    )
