"""``flintc tune``: which layouts of the products' kernels are quickest on this GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flintc.cli.common import (
    Context,
    Debug,
    For,
    Json,
    SpecArgument,
    WeightsOrOwn,
    check_folder,
    emit,
    progress,
    say,
    stdout,
)
from flintc.errors import UsageError

if TYPE_CHECKING:
    from flintc.bench.tune import Tuned


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tune")(tune_command)


def tune_command(
    spec: SpecArgument,
    weights: WeightsOrOwn = None,
    checkpoint: For = None,
    context: Context = 4096,
    prepare: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only compile the candidates into DIR, on a machine without a GPU."),
    ] = None,
    target: Annotated[str, typer.Option(help="GPU target that --prepare compiles for.")] = "sm_90",
    prepared: Annotated[Path | None, typer.Option(metavar="DIR", help="Candidates that --prepare compiled.")] = None,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Try only this one, e.g. w4r168; may be repeated (default: all).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.yaml", help="Schedule file to add what gains to.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time candidate layouts (warps, register budgets) of SPEC's products, each kernel in a chain of its own launches.

    What gains may be stored in flintc/codegen/schedules. The batch decides about register budgets alone, which change
    no result.
    """
    from flintc import api
    from flintc.bench import tune as bench

    if prepare is not None and (prepared is not None or out is not None):
        raise UsageError("--prepare only compiles: --prepared and --out are of the timing that follows it")
    model, format = api.model_of(spec, weights, checkpoint)
    if prepare is not None:
        with progress("compiling") as update:
            bench.prepare(model, format, target, prepare, candidate or (), update)
        emit(as_json, {"prepared": str(prepare)}, lambda: say(f"candidates in {prepare}"))
        return
    check_folder(out)
    if out is not None:
        bench.read_entries(out)  # a mistake is told before the work, not after it
    with progress("tuning") as update:
        tuned = bench.tune(model, format, context, prepared, candidate or (), update)
    entries = bench.entries(tuned)
    if out is not None:
        bench.write_entries(out, entries)
    emit(as_json, {"kernels": [asdict(t) for t in tuned], "entries": entries}, lambda: _show(tuned))


def _show(tuned: tuple[Tuned, ...]) -> None:
    table = Table("kernel", "by the rules, us", "best", "us", "eight rows: rules, us", "best", "us")
    for each in tuned:
        table.add_row(each.kernel, f"{each.rules.us:.2f}", each.best.candidate, f"{each.best.us:.2f}",
                      f"{each.rules.us_of_eight:.2f}", each.best_of_eight.candidate,
                      f"{each.best_of_eight.us_of_eight:.2f}")  # fmt: skip
    stdout.print(table)
