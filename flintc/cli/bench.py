"""``flintc bench``: times on the GPU, beside a read ceiling measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flintc.cli.common import (
    Batch,
    BundleFolder,
    Context,
    Debug,
    Json,
    SpecArgument,
    Trace,
    Weights,
    check_folder,
    emit,
    progress,
    stdout,
)
from flintc.errors import UsageError

if TYPE_CHECKING:
    from flintc.bench.compare import Comparison, Row
    from flintc.bench.decode import DecodeReport
    from flintc.bench.limits import Limits
    from flintc.bench.prefill import PrefillReport
    from flintc.bench.step_report import StepReport
    from flintc.bench.timeline import Timeline
    from flintc.bench.turns import Turns


def register(app: typer.Typer) -> None:
    """Add the command group to ``app``."""
    group = typer.Typer(help="Times on the GPU, beside a read ceiling measured in the same run.", no_args_is_help=True)
    group.command("forward")(forward_command)
    group.command("prefill")(prefill_command)
    group.command("generate")(generate_command)
    group.command("compare")(compare_command)
    group.command("limits")(limits_command)
    group.command("bundles")(bundles_command)
    group.command("timeline")(timeline_command)
    app.add_typer(group, name="bench")


def forward_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    bundle: BundleFolder = None,
    context: Context = 100_000,
    batch: Batch = 1,
    repeats: Annotated[int, typer.Option(min=10, help="Graph replays.")] = 50,
    trace: Trace = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time one forward step of SPEC with synthetic weights: in all, and per kernel as the profiler sees it."""
    from flintc.bench.step_report import measure_step

    check_folder(trace)
    with progress("measuring"):
        found = measure_step(spec, weights, bundle, context, batch, repeats, trace)
    emit(as_json, found.to_json(), lambda: _show(found))


def _show(found: StepReport) -> None:
    times = Table("part", "ms median", "p99", "tokens/s", "GB read", "% of ceiling")
    for part in found.parts:
        times.add_row(part.name, f"{part.ms:.3f}", f"{part.ms_p99:.3f}", f"{found.batch * 1e3 / part.ms:.0f}",
                      f"{part.nbytes / 1e9:.3f}", f"{part.share:.0%}")  # fmt: skip
    stdout.print(times)
    kernels = Table("kernel", "launches", "us each", "us alone", "MB", "GB/s", "% of ceiling", "programs", "per SM",
                    "redundancy")  # fmt: skip
    for k in found.kernels:
        kernels.add_row(k.name, str(k.launches), f"{k.us / k.launches:.2f}", f"{k.alone_us:.2f}", f"{k.mb:.2f}",
                        f"{k.mb * 1e3 / k.alone_us:.0f}", f"{k.share:.0%}", str(k.programs), str(k.resident),
                        f"{k.redundancy:.2f}")  # fmt: skip
    stdout.print(kernels)
    stdout.print(
        f"{found.spec}, {found.weights}, {found.context:,} tokens, batch {found.batch}; read ceiling "
        f"{found.ceiling / 1e12:.2f} TB/s on {found.gpu}; {found.launches} launches by the profiler.\n"
        "us each: in the step, by the profiler, which counts the wait of a launch that starts early. us alone: in a "
        "chain of the kernel's own launches, each with its own weights; MB, GB/s and % of the ceiling go with it. "
        "per SM: programs that fit at once.",
        highlight=False,
    )


def prefill_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    bundle: BundleFolder = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the prompts, by commas.")] = "1024,8192,32768",
    chunk: Annotated[int | None, typer.Option(min=1, help="Most tokens in a chunk (default: the runtime's).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt.")] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time prompts of SPEC with synthetic weights and random tokens, and the share of each kind of routine."""
    from flintc.bench.prefill import measure_prefill

    with progress("measuring"):
        found = measure_prefill(spec, weights, bundle, numbers("--tokens", tokens), chunk, repeats)
    emit(as_json, found.to_json(), lambda: _show_prefill(found))


def numbers(option: str, text: str) -> list[int]:
    """The numbers that an option gives by commas; UsageError where one is none, or below 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UsageError(f"{option} is {text!r}: expected numbers such as 8,16")
    return found


def _show_prefill(found: PrefillReport) -> None:
    times = Table("tokens", "ms", "tokens/s", "us a token", "% of tensor peak", "GB at most", "rows an expert got")
    for p in found.prompts:
        times.add_row(f"{p.tokens:,}", f"{p.ms:.1f}", f"{p.tokens * 1e3 / p.ms:,.0f}", f"{p.ms * 1e3 / p.tokens:.2f}",
                      f"{p.share:.0%}", f"{p.peak_bytes / 1e9:.2f}", " ".join(map(str, p.loads)))  # fmt: skip
    stdout.print(times)
    kinds = sorted({kind for p in found.prompts for kind in p.kinds})
    shares = Table("routine", *(f"{p.tokens:,}" for p in found.prompts))
    for kind in kinds:
        shares.add_row(kind, *(f"{p.kinds[kind]:.2f} ms, {p.kinds[kind] / sum(p.kinds.values()):.0%}"
                               for p in found.prompts))  # fmt: skip
    stdout.print(shares)
    stdout.print(
        f"{found.spec}, {found.weights}, chunks of {found.chunk:,}; tensor peak {found.peak / 1e12:.0f} TFLOP/s on "
        f"{found.gpu}, a square product. Rows an expert got: least, quarters, most, in the first chunk.",
        highlight=False,
    )


def generate_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    bundle: BundleFolder = None,
    batches: Annotated[str, typer.Option(help="Requests under way, by commas.")] = "1,2,4,8,9,12,16,32,64",
    context: Context = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 50,
    wide_from: Annotated[
        int | None, typer.Option(min=1, help="Requests from which on steps are wide (default: the runtime's).")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time requests of SPEC that decode together: how many of them a step serves, which kind of step, and how fast."""
    from flintc.bench.decode import measure_decode

    counts = numbers("--batches", batches)
    with progress("measuring"):
        found = measure_decode(spec, weights, bundle, context, counts, steps, wide_from)
    emit(as_json, found.to_json(), lambda: _show_decode(found))


def _show_decode(found: DecodeReport) -> None:
    times = Table("requests", "served by a step", "kind of step", "ms", "tokens/s")
    for t in found.times:
        times.add_row(str(t.requests), str(t.served), "wide" if t.wide else "fast", f"{t.ms:.3f}",
                      f"{t.tokens_per_second:,.0f}")  # fmt: skip
    stdout.print(times)
    stdout.print(
        f"{found.spec}, {found.weights}, {found.context:,} tokens a sequence, on {found.gpu}; wide steps from "
        f"{found.wide_from} requests on. Sampled on the device, with the host a step ahead, by its clock.",
        highlight=False,
    )


def compare_command(
    spec: SpecArgument = "flint",
    bundle: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Bundle with every pass (default: compiled here).")
    ] = None,
    baseline_bundle: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Bundle with no pass (default: compiled here).")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache before the step.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of transformers.")] = 5,
    with_compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also run transformers through torch.compile.")
    ] = True,
    compile_limit: Annotated[
        float | None,
        typer.Option(min=1.0, metavar="SECONDS", help="How long the row of torch.compile may take (default: 300)."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time one BF16 step of SPEC in transformers and in flintc, unfused and fused, with random weights on one GPU."""
    from flintc.bench.compare import COMPILE_LIMIT, measure_comparison

    if compile_limit is not None and not with_compile:
        raise UsageError("--compile-limit is of the row that --no-compile leaves out")
    limit = (compile_limit or COMPILE_LIMIT) if with_compile else None
    with progress("measuring") as update:
        found = measure_comparison(spec, bundle, baseline_bundle, context, repeats, limit, update)
    emit(as_json, found.to_json(), lambda: show_comparison(found))


def show_comparison(found: Comparison) -> None:
    """The rows as a table, then what ran in each, or why it did not."""
    table = Table("step", "ms", "launches", "GB/s", "% of ceiling", "times fused")
    for row in found.rows:
        table.add_row(row.name, *_compared(found, row))
    stdout.print(table)
    for row in found.rows:
        how = f"not measured: {row.failure}" if row.figures is None else row.figures.how
        stdout.print(f"{row.name}: {how}", markup=False, highlight=False)
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    stdout.print(
        f"{found.spec}, bf16, {found.context:,} tokens in the cache, batch 1, all layers and the final norm; read "
        f"ceiling {found.ceiling / 1e12:.2f} TB/s on {found.gpu}; {versions}.",
        highlight=False,
    )


def _compared(found: Comparison, row: Row) -> list[str]:
    """Cells of a row after its name; a dash where there is no figure."""
    if row.figures is None:
        return ["-"] * 5
    rate, share, ratio = found.rate(row), found.share(row), found.ratio(row)
    return [
        f"{row.figures.ms:.3f}",
        f"{row.figures.launches:,}",
        "-" if rate is None else f"{rate / 1e9:,.0f}",
        "-" if share is None else f"{share:.0%}",
        "-" if ratio is None else f"{ratio:.2f}",
    ]


def limits_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    bundle: BundleFolder = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that the sequence holds.")] = 100_000,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take a step of SPEC apart: long attention by tokens, layers whose weights are in L2, launches that only read."""
    from flintc.bench.limits import measure_limits

    with progress("measuring"):
        found = measure_limits(spec, weights, bundle, context)
    emit(as_json, found.to_json(), lambda: _show_limits(found))


def _show_limits(found: Limits) -> None:
    attention = Table("tokens", "long attention, us")
    for tokens, us in found.attention.items():
        attention.add_row(f"{tokens:,}", f"{us:.2f}")
    stdout.print(attention)
    reads = Table("programs that only read", "MB", "us", "% of ceiling")
    for programs, (nbytes, us) in found.reads.items():
        reads.add_row(f"{programs:,}", f"{nbytes / 1e6:.1f}", f"{us:.2f}", f"{nbytes / us * 1e6 / found.ceiling:.0%}")
    stdout.print(reads)
    stdout.print(
        f"A layer with experts: {found.layer:.2f} us in a chain of all of them; {found.layer_cached:.2f} where the "
        f"same few come again, their weights in L2.\n{found.spec}, {found.weights}, {found.context:,} tokens, batch 1; "
        f"read ceiling {found.ceiling / 1e12:.2f} TB/s on {found.gpu}.",
        highlight=False,
    )


def bundles_command(
    bundles: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Bundles of one model, two or more.")],
    context: Context = 100_000,
    batch: Batch = 1,
    repeats: Annotated[int, typer.Option(min=10, help="Graph replays of a turn.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each bundle.")] = 3,
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Also time kernels so called, or so beginning, alone.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time bundles of one model in turn, in one process and on the same tensors, and compare their logits."""
    from flintc.bench.turns import measure_turns

    with progress("measuring"):
        found = measure_turns(bundles, context, batch, repeats, rounds, kernel or ())
    emit(as_json, found.to_json(), lambda: _show_turns(found))


def _show_turns(found: Turns) -> None:
    first = found.sides[0]
    table = Table("bundle", "launches", "ms", "us to the first", "turns, ms", "logits")
    for side in found.sides:
        table.add_row(side.bundle, str(side.launches), f"{side.ms:.3f}", f"{(side.ms - first.ms) * 1e3:+.0f}",
                      " ".join(f"{ms:.3f}" for ms in side.rounds),
                      "equal" if side.equal else f"KL {side.kl:.1e}")  # fmt: skip
    stdout.print(table)
    names = dict.fromkeys(name for side in found.sides for name in side.alone_us)
    alone = Table("kernel, alone, us", *(side.bundle for side in found.sides))
    for name in names:
        alone.add_row(name, *(f"{side.alone_us[name]:.2f}" if name in side.alone_us else "-" for side in found.sides))
    if names:
        stdout.print(alone)
    stdout.print(
        f"{found.spec}, {found.weights}, {found.context:,} tokens, batch {found.batch}, all layers and the final norm; "
        f"read ceiling {found.ceiling / 1e12:.2f} TB/s on {found.gpu}.",
        highlight=False,
    )


def timeline_command(
    spec: SpecArgument,
    weights: Weights = "bf16",
    bundle: BundleFolder = None,
    context: Context = 100_000,
    batch: Batch = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Steps that are stamped.")] = 9,
    trace: Trace = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take a step of SPEC apart launch by launch, by the times at which programs start, have waited and end."""
    from flintc.bench.timeline import measure_timeline

    check_folder(trace)
    with progress("measuring"):
        found = measure_timeline(spec, weights, bundle, context, batch, repeats, trace)
    emit(as_json, found.to_json(), lambda: _show_timeline(found))


def _show_timeline(found: Timeline) -> None:
    table = Table("kernel", "launches", "hops, us", "hop", "ahead", "let go", "last", "work", "slowest", "tail",
                  "programs", "per SM")  # fmt: skip
    for kernel, hop in found.by_kernel().items():
        own = [h.hop for h in found.hops if h.kernel == kernel]
        figures = (hop.hop, hop.ahead, hop.let_go, hop.last_let_go, hop.work, hop.slowest, hop.tail)
        table.add_row(kernel, str(len(own)), f"{sum(own):.0f}", *(f"{us:.2f}" for us in figures), str(hop.programs),
                      str(hop.fullest))  # fmt: skip
    stdout.print(table)
    stdout.print(
        f"{found.spec}, {found.weights}, {found.context:,} tokens, batch {found.batch}, on {found.gpu}: {found.ms:.3f} "
        f"ms a step, {found.stamped_ms:.3f} with stamps. us, the middle of each kernel's launches.\n"
        "hop: from the end of the launch before to its own end. ahead: how long before the former half of its programs "
        "stand waiting. let go, last: from there until half, until all of them go on. work, slowest: from going on to "
        "the end, half of the programs and the slowest. tail: from half ended to all.",
        highlight=False,
    )
