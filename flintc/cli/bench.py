"""``flintc bench``: times on the GPU, beside a read ceiling measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flintc.cli.common import Debug, Json, SpecArgument, Weights, emit, progress, stdout

if TYPE_CHECKING:
    from flintc.bench.step_report import StepReport


def register(app: typer.Typer) -> None:
    """Add the command group to ``app``."""
    group = typer.Typer(help="Times on the GPU, beside a read ceiling measured in the same run.", no_args_is_help=True)
    group.command("forward")(forward_command)
    app.add_typer(group, name="bench")


def forward_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    bundle: Annotated[Path | None, typer.Option(help="Bundle folder (default: compiled on first use, cached).")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each sequence holds.")] = 100_000,
    batch: Annotated[int, typer.Option(min=1, max=8, help="Sequences decoded together.")] = 1,
    repeats: Annotated[int, typer.Option(min=10, help="Graph replays.")] = 50,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Also write a Chrome trace of one step.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time one forward step of SPEC with synthetic weights: in all, and per kernel as the profiler sees it."""
    from flintc.bench.step_report import measure_step

    with progress("measuring"):
        found = measure_step(spec, weights, bundle, context, batch, repeats, trace)
    emit(as_json, found.to_json(), lambda: _show(found))


def _show(found: StepReport) -> None:
    times = Table("part", "ms median", "p99", "tokens/s", "GB read", "% of ceiling")
    for part in found.parts:
        times.add_row(part.name, f"{part.ms:.3f}", f"{part.ms_p99:.3f}", f"{found.batch * 1e3 / part.ms:.0f}",
                      f"{part.nbytes / 1e9:.3f}", f"{part.share:.0%}")  # fmt: skip
    stdout.print(times)
    kernels = Table("kernel", "launches", "us in all", "us each", "MB each", "redundancy")
    for k in found.kernels:
        kernels.add_row(k.name, str(k.launches), f"{k.us:.1f}", f"{k.us / k.launches:.2f}", f"{k.mb:.2f}",
                        f"{k.redundancy:.2f}")  # fmt: skip
    stdout.print(kernels)
    stdout.print(
        f"{found.spec}, {found.weights}, {found.context:,} tokens, batch {found.batch}; read ceiling "
        f"{found.ceiling / 1e12:.2f} TB/s on {found.gpu}; {found.launches} launches by the profiler. A launch that "
        "starts early counts its wait: kernels' times add up to more than the step's.",
        highlight=False,
    )
