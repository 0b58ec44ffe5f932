"""``flintc generate``: text from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flintc.bench.memory import AnonymousPeak
from flintc.bench.started import seconds_since_start
from flintc.cli.common import BackendName, BundleFolder, Debug, Json, emit, progress
from flintc.errors import UsageError

if TYPE_CHECKING:
    from flintc.runtime.generation import Generation
    from flintc.runtime.model import Model


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate")(generate_command)


def generate_command(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A folder of safetensors, a .gguf file, or a hub id org/name\\[@revision]\\[:file.gguf]."),
    ],
    prompt: Annotated[str | None, typer.Option(help="Raw text to continue.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user message, put through the chat template.")] = None,
    bundle: BundleFolder = None,
    config: Annotated[str | None, typer.Option(help="Folder or hub id with the config.json to use.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id with the tokenizer to use.")] = None,
    spec: Annotated[str | None, typer.Option(help="Spec to use in place of the one the checkpoint names.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that hold this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Most tokens, prompt and output together.")] = None,
    backend: Annotated[BackendName | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    prepared: Annotated[
        bool, typer.Option("--prepared", help="Keep a copy of the weights as kernels read them; use it next time.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tell what loading took, and the first token.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt, or answer a message, with the model of CHECKPOINT."""
    from flintc import api

    if (prompt is None) == (chat is None):
        raise UsageError("give either --prompt or --chat")
    peak = AnonymousPeak()
    with progress("loading") as update, peak if stats else nullcontext():
        model = api.load(
            checkpoint,
            bundle=bundle,
            backend=None if backend is None else backend.value,
            spec=spec,
            tokenizer=tokenizer,
            config=config,
            context=context,
            prepared=prepared,
            progress=update,
        )
    loading = _loading(model, peak.nbytes) if stats else {}
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    options: dict[str, Any] = {"max_tokens": max_tokens, **{k: v for k, v in given.items() if v is not None}}
    ids = _prompt_ids(model, prompt, chat)
    if as_json or not sys.stdout.isatty():
        result, seconds = _generate(model, ids, options)
        told = {"first_token_seconds": seconds, "loading": loading} if stats else {}
        emit(as_json, asdict(result) | told, lambda: print(result.text))
    else:
        seconds = _stream(model, ids, options)
    if stats and not as_json:
        _show_stats(loading, seconds)


def _generate(model: Model, ids: Sequence[int], options: Any) -> tuple[Generation, float | None]:
    """What ``model.generate`` makes, and the age of the process when it had the first token."""
    request = model.request(ids, options)
    events = model.events([request])
    first, seconds = next(events), seconds_since_start()
    return model.result(request, [first, *events]), seconds


def _stream(model: Model, ids: Sequence[int], options: Any) -> float | None:
    """Write the text as it comes; the age of the process when it had the first token."""
    tokens = model.stream(ids, **options)
    first, seconds = next(tokens), seconds_since_start()
    for token in chain((first,), tokens):
        sys.stdout.write(token.text or "")
        sys.stdout.flush()
    sys.stdout.write("\n")
    return seconds


def _prompt_ids(model: Model, prompt: str | None, chat: str | None) -> Sequence[int]:
    if prompt is not None:
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode_chat([{"role": "user", "content": chat}])


def _loading(model: Model, host_peak: int | None) -> dict[str, Any]:
    """What loading took: bytes, seconds, GB/s."""
    assert model.loaded is not None
    report = model.loaded
    return {
        "source": report.source,
        "tensors": len(report.used),
        "bytes_read": report.nbytes,
        "seconds": report.seconds,
        "gb_per_s": report.rate,
        "weight_bytes": report.weight_bytes,
        "device_peak_bytes": report.device_peak,
        "host_peak_anonymous_bytes": host_peak,
        "notes": list(model.notes),
    }


def _show_stats(loading: dict[str, Any], first_token: float | None) -> None:
    """The same for people, on stderr: stdout is the text's."""
    peaks = {"GPU": loading["device_peak_bytes"], "host (anonymous)": loading["host_peak_anonymous_bytes"]}
    said = [f"{where} {nbytes / 1e9:.3f} GB" for where, nbytes in peaks.items() if nbytes is not None]
    lines = [*loading["notes"], f"weights take {loading['weight_bytes'] / 1e9:.3f} GB; peak while loading: "]
    lines[-1] += ", ".join(said)
    if first_token is not None:
        lines.append(f"first token {first_token:.2f} s after the start of the process")
    sys.stderr.writelines(f"{line}\n" for line in lines)
