"""``flintc synth``: a checkpoint with random weights, in the published form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flintc.cli.common import Debug, Json, emit, progress, say
from flintc.errors import UsageError


class CheckpointFormat(StrEnum):
    """Published form of a checkpoint."""

    safetensors = "safetensors"
    gguf = "gguf"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("synth")(synth_command)


def synth_command(
    spec: Annotated[str, typer.Option(metavar="SPEC", help="A spec file, or the name of a shipped one.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder (safetensors) or file (gguf) to write.")],
    output: Annotated[CheckpointFormat, typer.Option("--format", help="safetensors (BF16) or gguf (NVFP4).")] = (
        CheckpointFormat.safetensors
    ),
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal bytes.")] = 0,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=N", help="Another size, e.g. experts=16."),
    ] = None,
    demo_tokenizer: Annotated[bool, typer.Option(help="Add a byte-level tokenizer and a chat template.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint of SPEC's size with random weights, peaked logits included. Streams: memory stays small."""
    from flintc import api

    with progress("writing") as update:
        files = api.synth(
            spec,
            out,
            format=output.value,
            seed=seed,
            sizes=dict(_size(s) for s in sizes or ()),
            demo_tokenizer=demo_tokenizer,
            progress=update,
        )
    total = sum(f.stat().st_size for f in files)
    data = {"path": str(out), "format": output.value, "seed": seed, "bytes": total, "files": [f.name for f in files]}
    emit(as_json, data, lambda: say(f"{total / 1e9:.3f} GB in {len(files)} files -> {out}"))


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdecimal():
        raise UsageError(f"--set {text!r} is not NAME=N", remedy="for example --set experts=16")
    return name, int(number)
