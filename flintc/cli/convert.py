"""``flintc convert``: a checkpoint as NVFP4, in either published form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flintc.cli.common import Debug, Json, emit, progress, say
from flintc.cli.synth import CheckpointFormat

if TYPE_CHECKING:
    from flintc.checkpoint.convert import ConvertReport


class Device(StrEnum):
    """Where weights are computed on."""

    cpu = "cpu"
    cuda = "cuda"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("convert")(convert_command)


def convert_command(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A folder of safetensors, a .gguf file, or a hub id.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="File (gguf) or folder (safetensors) to write.")],
    output: Annotated[CheckpointFormat, typer.Option("--format", help="gguf, or safetensors in ModelOpt's layout.")],
    config: Annotated[
        str | None, typer.Option("--config", metavar="DIR", help="Folder or hub id whose config.json is used.")
    ] = None,
    spec: Annotated[str | None, typer.Option("--spec", help="Spec of the model, if not the one it names.")] = None,
    device: Annotated[Device, typer.Option("--device", help="Where quantising and repacking run.")] = Device.cpu,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write CHECKPOINT as NVFP4. NVFP4 keeps its numbers exactly; BF16 is quantised, the error reported per tensor."""
    import torch

    from flintc.checkpoint.convert import convert
    from flintc.errors import BackendError
    from flintc.runtime.hub import find_checkpoint, find_companion
    from flintc.spec import load_spec

    if device is Device.cuda and not torch.cuda.is_available():
        raise BackendError("there is no NVIDIA GPU here that torch can use", remedy="leave --device out")
    with progress("converting") as update:
        report = convert(
            find_checkpoint(checkpoint),
            out,
            output.value,
            spec=None if spec is None else load_spec(spec),
            config=None if config is None else find_companion(config),
            device=device.value,
            progress=update,
        )
    emit(as_json, _data(out, output, report), lambda: _show(out, report))


def _data(out: Path, output: CheckpointFormat, report: ConvertReport) -> dict[str, Any]:
    return {
        "path": str(out),
        "format": output.value,
        "bytes": _size(report),
        "files": [file.name for file in report.files],
        "errors": {name: {"relative": e.relative, "largest": e.largest} for name, e in report.errors.items()},
        "notes": report.notes,
    }


def _size(report: ConvertReport) -> int:
    return sum(file.stat().st_size for file in report.files)


def _show(out: Path, report: ConvertReport) -> None:
    say(f"{_size(report) / 1e9:.3f} GB in {len(report.files)} files -> {out}")
    if report.errors:
        worst = sorted(report.errors.items(), key=lambda item: -item[1].relative)
        say(f"{len(worst)} tensors quantised; relative error of the worst (--json lists all):")
        for name, error in worst[:5]:
            say(f"  {error.relative:.2%}  {name}")
    for note in report.notes:
        say(f"note: {note}")
