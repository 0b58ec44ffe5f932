"""``flintc compile``: a spec becomes a bundle of kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from flintc.cli.common import (
    Debug,
    Disabled,
    For,
    Json,
    SpecArgument,
    WeightsOrOwn,
    emit,
    progress,
    say,
    say_warning,
    split_list,
    stdout,
)

if TYPE_CHECKING:
    from flintc.bundle import Bundle


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("compile")(compile_command)


def compile_command(
    spec: SpecArgument,
    weights: WeightsOrOwn = None,
    checkpoint: For = None,
    target: Annotated[str, typer.Option(help="GPU targets, e.g. sm_90,sm_100.")] = "sm_90",
    batch: Annotated[str, typer.Option(help="Batch sizes to capture, each at most 8.")] = "1,2,4,8",
    disable_pass: Disabled = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Bundle folder (default: the cache).")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile SPEC into a bundle: a plan, and one kernel per distinct launch and target. Needs no GPU."""
    from flintc import api

    with progress("compiling") as update:
        bundle = api.compile(
            spec,
            weights=weights,
            target=split_list(target),
            batch=_batches(batch),
            disable_passes=tuple(disable_pass or ()),
            out=out,
            progress=update,
            checkpoint=checkpoint,
        )
    manifest = bundle.manifest
    for warning in manifest.warnings:
        say_warning(warning)
    data = {
        "bundle": str(bundle.path),
        "spec": manifest.spec,
        "weights": manifest.weights,
        "targets": list(manifest.targets),
        "pipeline": list(manifest.pipeline),
        "launches": len(bundle.plan.launches),
        "kernels": [k.model_dump() for k in manifest.kernels],
    }

    emit(as_json, data, lambda: _show(bundle))


def _show(bundle: Bundle) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("kernel", no_wrap=True)
    for heading in ("target", "uses", "warps", "regs", "smem", "spill"):
        table.add_column(heading, justify="right")
    plan = bundle.plan
    launches = (*plan.launches, *(plan.sampler.launches if plan.sampler is not None else ()))
    kernels = [plan.kernels[launch.kernel] for launch in launches]
    uses = Counter(name for k in kernels for name in (k.name, k.several) if name is not None)
    if bundle.plan.general is not None:
        uses.update(kernel for routine in bundle.plan.general.routines for kernel in routine.kernels.values())
    for k in bundle.manifest.kernels:
        figures = (uses[k.name], k.num_warps, k.registers, k.shared_bytes, k.spill_stores + k.spill_loads)
        table.add_row(k.name, k.target, *map(str, figures))
    stdout.print(table)
    say(f"{len(bundle.plan.launches)} launches, {len(bundle.plan.all_kernels)} kernels -> {bundle.path}")


def _batches(text: str) -> tuple[int, ...]:
    from flintc.errors import UsageError

    items = split_list(text)
    if not items or not all(i.isdecimal() for i in items):
        raise UsageError(f"--batch {text!r} is not a list of whole numbers", remedy="for example --batch 1,2,4,8")
    return tuple(int(i) for i in items)
