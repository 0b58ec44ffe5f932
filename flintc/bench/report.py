"""The ablation as one HTML file: waterfall of launches, costs, published steps beside ours. Needs no other file."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from flintc.bench.ablation import Ablation, added_note, estimate_note, redundancy_text
from flintc.codegen.cache import write_atomically
from flintc.ir.graph import Graph
from flintc.ir.svg import to_svg
from flintc.passes import PASSES, PipelineRun

#: Pixels of the waterfall: height of the tallest bar, width of a column and of a bar.
_HEIGHT, _COLUMN, _BAR = 260.0, 118.0, 70.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One step of the waterfall; ``drop`` is the part that the step took away, negative where it added one."""

    name: str
    launches: int
    fewer: int
    x: float
    top: float
    height: float
    drop: float


@dataclass(frozen=True, slots=True)
class KindDifference:
    """A kind of layer, its launches before the first pass, and how many fewer that is than published per layer."""

    label: str
    layers: int
    launches: int
    fewer: int


def write_report(path: Path, ablation: Ablation, run: PipelineRun) -> None:
    """Write the report to ``path``, its folder included; the file appears whole or not at all."""
    text = render_report(ablation, run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        error.filename = str(path)  # what the user asked for, not the temporary file
        raise


def render_report(ablation: Ablation, run: PipelineRun) -> str:
    """HTML of the report; ``run`` is what ``ablation`` was derived from."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flintc.bench", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    published = published_for(ablation)
    layer = max(ablation.kinds, key=lambda kind: len(kind.layers)).layers[0]
    return environment.get_template("ablation.html.j2").render(
        ablation=ablation,
        bars=waterfall(ablation),
        column=_COLUMN,
        bar=_BAR,
        chart=(len(ablation.steps) * _COLUMN, _HEIGHT),
        note=estimate_note(ablation),
        added=added_note(ablation),
        redundancy=redundancy_text,
        docs={name: p.doc.split("\n\n")[0].replace("\n", " ") for name, p in PASSES.items()},
        layer=layer,
        drawings=[("before", _image(run.steps[0].graph, layer)), ("after", _image(run.graph, layer))],
        published=published,
        counterparts=_counterparts(ablation, published) if published else [],
        differences=_differences(ablation, published) if published else [],
    )


def load_published() -> Mapping[str, Any]:
    """Published results by spec name."""
    text = resources.files("flintc.bench").joinpath("published.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(text)
    return loaded


def published_for(ablation: Ablation) -> Mapping[str, Any] | None:
    """Published results for a model of this spec and this many layers, if there are any."""
    found = load_published().get(ablation.spec)
    layers = sum(len(kind.layers) for kind in ablation.kinds)
    return found if found is not None and found["layers"] == layers else None


def waterfall(ablation: Ablation) -> list[Bar]:
    """Bars of launches per step, scaled so that the tallest fills the chart."""
    most = max(step.launches for step in ablation.steps)
    bars = []
    before = ablation.steps[0].launches
    for i, step in enumerate(ablation.steps):
        height = _HEIGHT * step.launches / most
        fewer = before - step.launches
        x = i * _COLUMN + (_COLUMN - _BAR) / 2
        bars.append(Bar(step.name, step.launches, fewer, x, _HEIGHT - height, height, _HEIGHT * fewer / most))
        before = step.launches
    return bars


def _counterparts(ablation: Ablation, published: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the comparison: each published step with our pass, then our passes that have no published step."""
    by_name = {bar.name: bar for bar in waterfall(ablation)}
    rows: list[dict[str, Any]] = []
    for step in published["steps"]:
        bar = by_name.get(step["pass"])
        rows.append({"text": step["text"], "percent": step["percent"], "bar": bar, "note": step.get("note", "")})
    matched = {step["pass"] for step in published["steps"]}
    for bar in list(by_name.values())[1:]:
        if bar.name not in matched:
            note = "launches added to save time" if bar.fewer < 0 else ""
            rows.append({"text": None, "percent": None, "bar": bar, "note": note})
    return rows


def _differences(ablation: Ablation, published: Mapping[str, Any]) -> list[KindDifference]:
    """Where the launches of a layer before the first pass differ from the published figure."""
    rows = []
    for kind in ablation.kinds:
        launches = ablation.steps[0].per_layer[kind.layers[0]]
        fewer = (published["per_layer_before"] - launches) * len(kind.layers)
        rows.append(KindDifference(kind.label, len(kind.layers), launches, fewer))
    return rows


def _image(graph: Graph, layer: int) -> str:
    """The drawing of a layer as a data URI: an image of its own keeps its styles to itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(to_svg(graph, layer).encode()).decode()
