"""``flintc show``: the graph of a spec, before and after any pass."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from flintc.cli.common import Debug, Disabled, For, SpecArgument, WeightsOrOwn


class Format(StrEnum):
    """What ``show`` prints."""

    text = "text"
    json = "json"
    dot = "dot"
    svg = "svg"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("show")(show_command)


def show_command(
    spec: SpecArgument,
    after: Annotated[
        str | None, typer.Option(metavar="PASS", help="Show the graph after this pass ('baseline': before all).")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Only this layer (svg: default 0).")] = None,
    output: Annotated[Format, typer.Option("--format", help="text, json, dot (all layers) or svg (one layer).")] = (
        Format.text
    ),
    weights: WeightsOrOwn = None,
    checkpoint: For = None,
    disable_pass: Disabled = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    debug: Debug = False,
) -> None:
    """Print the launches and ops of SPEC after the whole pipeline, or after one pass of it."""
    from flintc import api
    from flintc.ir import printer, serialize
    from flintc.ir.dot import to_dot
    from flintc.ir.svg import to_svg

    graph = api.lower(spec, weights, tuple(disable_pass or ()), stop_after=after, checkpoint=checkpoint)
    if layer is not None:
        printer.need_layer(graph, layer)
    match Format.json if as_json else output:
        case Format.text:
            text = printer.to_text(graph, layer)
        case Format.json:
            text = json.dumps(serialize.graph_to_json(graph), ensure_ascii=False)
        case Format.dot:
            text = to_dot(graph)
        case Format.svg:
            text = to_svg(graph, layer or 0)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
