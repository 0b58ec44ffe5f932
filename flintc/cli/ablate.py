"""``flintc ablate``: what each fusion pass saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flintc.cli.common import Debug, Disabled, For, Json, SpecArgument, WeightsOrOwn, emit, progress, say, stdout

if TYPE_CHECKING:
    from flintc.bench.ablation import Ablation
    from flintc.spec import BoundModel


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("ablate")(ablate_command)


def ablate_command(
    spec: SpecArgument,
    weights: WeightsOrOwn = None,
    checkpoint: For = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of context (default: 100,000, or the model's limit).")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the step.")] = 1,
    bandwidth: Annotated[float, typer.Option(help="TB/s that the estimated time assumes.")] = 4.64,
    disable_pass: Disabled = None,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="synthetic|CHECKPOINT",
            help="Also measure: times on this GPU with synthetic weights, or accuracy on CHECKPOINT, at its sizes.",
        ),
    ] = None,
    bundles: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Bundles made ahead, one per prefix, for --measure synthetic.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write a self-contained HTML report.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run SPEC's pipeline pass by pass: launches per layer and in total, bytes, redundancy, estimated time."""
    from flintc import api
    from flintc.bench.ablation import CONTEXT, ablate
    from flintc.bench.report import write_report
    from flintc.errors import UsageError

    if measure == "synthetic" and batch > api.MAX_BATCH:
        raise UsageError(f"--batch is {batch}: steps of up to {api.MAX_BATCH} rows can be measured")
    if measure != "synthetic" and bundles is not None:
        raise UsageError("--bundles says what --measure synthetic runs, which is not asked for")
    measured = None if measure == "synthetic" else measure
    if None not in (measured, checkpoint) and measured != checkpoint:
        raise UsageError("--for and --measure name two checkpoints", remedy="--measure takes the sizes of its own")
    model, format = api.model_of(spec, weights, measured or checkpoint)
    run = api.run_passes(model, format, tuple(disable_pass or ()))
    tokens = context or min(CONTEXT, model.dims["context"])
    ablation = ablate(run, context=tokens, batch=batch, bandwidth=bandwidth * 1e12)
    if measure == "synthetic":
        ablation = _with_times(model, ablation, bundles)
    elif measured is not None:
        ablation = _with_accuracy(ablation, measured, spec, tuple(disable_pass or ()))
    emit(as_json, ablation.to_json(), lambda: show_ablation(ablation))
    if report is not None:
        write_report(report, ablation, run)
        if not as_json:
            say(f"report -> {report}")


def _with_times(model: BoundModel, ablation: Ablation, bundles: Path | None) -> Ablation:
    from flintc.bench.prefixes import measure_prefixes, with_measurements

    with progress("measuring") as update:
        return with_measurements(ablation, *measure_prefixes(model, ablation, bundles=bundles, progress=update))


def _with_accuracy(ablation: Ablation, checkpoint: str, spec: str, disabled: tuple[str, ...]) -> Ablation:
    from dataclasses import replace

    from flintc.bench.accuracy import measure_accuracy
    from flintc.bench.subject import open_subject
    from flintc.bench.verify import choose_kernels
    from flintc.errors import UsageError

    backend = choose_kernels()  # a mistake is told before the work, not after it
    with progress("measuring") as update:
        subject = replace(open_subject(checkpoint, spec=spec), disabled=disabled)
        if subject.format != ablation.weights:
            raise UsageError(
                f"the weights of {checkpoint} are {subject.format}, not {ablation.weights}",
                remedy="leave --weights out",
            )
        found = measure_accuracy(subject, [step.name for step in ablation.steps], backend, update)
    for name, accuracy in found.items():
        ablation = ablation.measured(
            name, kl_fp32=accuracy.kl_fp32, kl_baseline=accuracy.kl_baseline, kl_positions=accuracy.positions
        )
    return ablation


def show_ablation(ablation: Ablation) -> None:
    """The tables, and the published counts beside ours where there are any."""
    from flintc.bench.ablation import ablation_table, added_note
    from flintc.bench.report import published_for

    stdout.print(ablation_table(ablation))
    if published := published_for(ablation):
        first, fewest = ablation.steps[0], ablation.fewest
        before, after = published["launches_before"], published["launches_after"]
        say(f"{first.launches:,} -> {fewest.launches:,}; published: {before:,} -> {after:,}, counted otherwise")
        if added := added_note(ablation):
            say(added)
        say("(--report FILE.html explains the difference)")
