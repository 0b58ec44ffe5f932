"""``flintc verify``: whether a checkpoint computes what it should."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flintc.cli.common import BackendName, Debug, Json, check_folder, emit, progress, stdout

if TYPE_CHECKING:
    from flintc.bench.bisect import Bisection, Run
    from flintc.bench.subject import Subject
    from flintc.bench.verify import Verification


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("verify")(verify_command)


def verify_command(
    checkpoint: Annotated[str, typer.Argument(help="A folder of safetensors, a .gguf file, or a hub id.")],
    bundle: Annotated[Path | None, typer.Option(help="Bundle folder whose plan and kernels are verified.")] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to measure on (default: one shipped).")
    ] = None,
    backend: Annotated[
        BackendName | None, typer.Option(help="Runs the whole model (default: cuda, else reference).")
    ] = None,
    kernels: Annotated[
        BackendName | None, typer.Option(help="Runs single kernels (default: cuda, else interpret).")
    ] = None,
    every_launch: Annotated[bool, typer.Option(help="Check every launch, not one per kernel.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Most prompts to cut from the text.")] = 64,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each (default: 200, or past the window).")
    ] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Compare two runs value by value instead.")] = False,
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="With --bisect, twice: BACKEND\\[@PASS]\\[/BATCH], or a saved trace."),
    ] = None,
    save_trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the first run of --bisect.")] = None,
    spec: Annotated[str | None, typer.Option(help="Spec to use in place of the one the checkpoint names.")] = None,
    config: Annotated[Path | None, typer.Option(help="Folder or hub id with the config.json to use.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder or hub id with the tokenizer to use.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Error of each kernel on real activations, and the KL of the whole model from an FP32 forward in transformers.

    Fails (exit 1) where a kernel is off by more than its rounding allows, or the model's KL from FP32 exceeds 1.25
    times that of transformers' own BF16, pooled, with 95 % confidence.
    """
    from flintc.bench.subject import open_subject
    from flintc.bench.verify import choose_backends, make_prompts
    from flintc.errors import UsageError

    if not bisect and (run or save_trace is not None):
        raise UsageError("--run and --save-trace are of --bisect, which is not asked for")
    if bisect and (backend or kernels):
        raise UsageError("--backend and --kernels are not of --bisect", remedy="say with --run what runs")
    # A mistake is told before the work, not after it.
    check_folder(save_trace)
    given = _read(text)
    runs = _runs(run or []) if bisect else None
    if runs is None:
        choose_backends(backend, kernels)
    with progress("loading"):
        subject = open_subject(checkpoint, bundle=bundle, spec=spec, config=config, tokenizer=tokenizer)
    cut = make_prompts(subject, given, tokens, prompts)
    if runs is not None:
        _bisect(subject, cut, *runs, save_trace, as_json)
        return
    with progress("verifying") as update:
        from flintc.bench.verify import verify

        found = verify(subject, cut, backend, kernels, every=every_launch, progress=update)
    emit(as_json, found.to_json(), lambda: _show(found))
    if found.passed is False:
        raise typer.Exit(1)


def _read(path: Path | None) -> str | None:
    from flintc.errors import UsageError

    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text in UTF-8: {error}") from None


def _show(found: Verification) -> None:
    table = Table("kernel", "launches", "checked", "worst value", "error / allowed", "error", title="kernels")
    for check in found.kernels:
        worst = check.worst
        mark = "" if worst.passed else f"  {worst.wrong} of {worst.count} off"
        table.add_row(check.kernel, str(check.launches), check.launch, worst.value, f"{worst.excess:.2f}{mark}",
                      f"{worst.error:.3g}")  # fmt: skip
    stdout.print(table)
    models = Table("against FP32", "KL mean", "KL p99", "KL max", "same top-1", "perplexity",
                   title=f"{found.prompts} prompts, {found.tokens} tokens")  # fmt: skip
    measured = [(f"flintc, {m.path}", m.divergence) for m in found.models]
    for name, d in (*measured, ("transformers, BF16", found.yardstick)):
        models.add_row(
            name, f"{d.mean:.3e}", f"{d.p99:.3e}", f"{d.largest:.3e}", f"{d.top1:.2%}", f"{d.perplexity:.4f}"
        )
    models.add_row("transformers, FP32", "", "", "", "", f"{found.exact:.4f}")
    stdout.print(models)
    words = {True: "passed", False: "FAILED", None: "undecided"}
    wrong = sum(not k.worst.passed for k in found.kernels)
    stdout.print(f"{words[not wrong]}: {len(found.kernels)} kernels, {wrong} beyond rounding", highlight=False)
    for m in found.models:
        stdout.print(f"{words[m.verdict.passed]}: {m.path}: {m.verdict.reason}", markup=False, highlight=False)


def _runs(given: list[str]) -> tuple[Run | Path, Run]:
    """The two runs of a bisection, the first perhaps a saved trace; an error where one cannot be made here."""
    from flintc.bench.bisect import parse_run
    from flintc.bench.subject import check_backend, default_backend
    from flintc.errors import UsageError

    if len(given) > 2:
        raise UsageError("--run is given more than twice")
    one, other = [*given, *("reference/8", f"{default_backend('interpret')}/8")[len(given) :]]
    first = Path(one) if Path(one).is_file() else parse_run(one)
    second = parse_run(other)
    for run in (first, second):
        if not isinstance(run, Path):
            check_backend(run.backend)
    return first, second


def _bisect(
    subject: Subject, prompts: list[list[int]], first: Run | Path, second: Run, save: Path | None, as_json: bool
) -> None:
    from flintc.bench import bisect as search
    from flintc.bench.step import filler, prepare_step
    from flintc.bench.verify import step_prompts

    runner = subject.runner(second.backend, second.after)
    with progress("bisecting") as update:
        if isinstance(first, Path):
            trace = search.load_trace(first, subject, runner.device)
        else:
            traced = subject.runner(first.backend, first.after)
            inputs = prepare_step(subject, step_prompts(subject, prompts), filler(traced), traced.device)
            trace = search.trace_run(first, traced, inputs).to(runner.device)
        if save is not None:
            search.save_trace(save, trace, subject.graph("baseline"))
        found = search.bisect(subject, trace, second, runner, update)
    emit(as_json, found.to_json(), lambda: _show_bisection(found))
    if found.found is not None:
        raise typer.Exit(1)


def _show_bisection(found: Bisection) -> None:
    bound = "bit for bit" if found.exact else "within rounding"
    worst = found.found
    if worst is None:
        stdout.print(
            f"{found.first} and {found.second} agree {bound}: {found.values} values of {found.launches} launches"
        )
        return
    where = "outside the layers" if found.layer is None else f"layer {found.layer}"
    stdout.print(
        f"first difference in {worst.value}, launch {found.launch} ({where}): {' '.join(found.ops)}", markup=False
    )
    stdout.print(
        f"at {list(worst.place)}: {found.second} has {worst.got:.8g}, {found.first} {worst.want:.8g}; off by "
        f"{worst.error:.3g}, allowed {worst.allowed:.3g} ({bound}); {worst.wrong} of {worst.count} values are off",
        markup=False,
    )
