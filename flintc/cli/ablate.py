"""``flintc ablate``: what each fusion pass saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flintc.cli.common import Debug, Disabled, Json, SpecArgument, Weights, emit, stderr, stdout


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("ablate")(ablate_command)


def ablate_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of context that costs are counted for.")] = 100_000,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the step.")] = 1,
    bandwidth: Annotated[float, typer.Option(help="TB/s that the estimated time assumes.")] = 4.64,
    disable_pass: Disabled = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write a self-contained HTML report.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run SPEC's pipeline pass by pass: launches per layer and in total, bytes, redundancy, estimated time."""
    from flintc import api
    from flintc.bench.ablation import ablate, ablation_table
    from flintc.bench.report import write_report
    from flintc.spec import bind_defaults, load_spec

    run = api.run_passes(bind_defaults(load_spec(spec)), weights, tuple(disable_pass or ()))
    ablation = ablate(run, context=context, batch=batch, bandwidth=bandwidth * 1e12)
    if report is not None:
        write_report(report, ablation, run)
    emit(as_json, ablation.to_json(), lambda: stdout.print(ablation_table(ablation)))
    if report is not None and not as_json:
        stderr.print(f"report -> {report}", highlight=False)
