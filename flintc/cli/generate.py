"""``flintc generate``: text from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flintc.cli.common import Debug, Json, emit, progress
from flintc.errors import UsageError

if TYPE_CHECKING:
    from flintc.runtime.model import Model


class BackendName(StrEnum):
    """What runs the plan."""

    cuda = "cuda"
    interpret = "interpret"
    reference = "reference"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate")(generate_command)


def generate_command(
    checkpoint: Annotated[str, typer.Argument(help="A folder of safetensors, a .gguf file, or a hub id.")],
    prompt: Annotated[str | None, typer.Option(help="Raw text to continue.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message, put through the chat template.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Bundle folder (default: compiled on first use, cached).")] = None,
    config: Annotated[Path | None, typer.Option(help="Folder with the config.json to use.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with the tokenizer to use.")] = None,
    spec: Annotated[str | None, typer.Option(help="Spec to use in place of the one the checkpoint names.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that hold this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Most tokens, prompt and output together.")] = None,
    backend: Annotated[BackendName | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or answer a message, with the model of CHECKPOINT."""
    from flintc import api

    if (prompt is None) == (chat is None):
        raise UsageError("give either --prompt or --chat")
    with progress("loading") as update:
        model = api.load(
            checkpoint,
            bundle=bundle,
            backend=None if backend is None else backend.value,
            spec=spec,
            tokenizer=tokenizer,
            config=config,
            context=context,
            progress=update,
        )
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    options: dict[str, Any] = {"max_tokens": max_tokens, **{k: v for k, v in given.items() if v is not None}}
    ids = _prompt_ids(model, prompt, chat)
    if as_json or not sys.stdout.isatty():
        result = model.generate(ids, **options)
        emit(as_json, asdict(result), lambda: print(result.text))
        return
    for token in model.stream(ids, **options):
        sys.stdout.write(token.text or "")
        sys.stdout.flush()
    sys.stdout.write("\n")


def _prompt_ids(model: Model, prompt: str | None, chat: str | None) -> Sequence[int]:
    if prompt is not None:
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode_chat([{"role": "user", "content": chat}])
