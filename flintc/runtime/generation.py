"""What a request may ask for, what it falls back on, and what it gets back."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from flintc.errors import CheckpointError, UsageError
from flintc.runtime.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


class Options(TypedDict, total=False):
    """How to generate; what is left out comes from the checkpoint's defaults.

    max_tokens: most tokens to make (left out: as many as the context holds). temperature, top_p, top_k, seed: see
    :class:`SamplingParams`; without a seed one is drawn, and the result names it. stop_ids: ids that end the text,
    in place of the checkpoint's own; ``()`` never stops.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_ids: Iterable[int]


@dataclass(frozen=True, slots=True)
class Generation:
    """The outcome of one request.

    token_ids: every token made, the one that ended it included. text: without that one and without special tokens;
    None where the model has no tokenizer. finish_reason: ``stop`` (a stop id) or ``length``. path: which executor ran.
    seed: repeats the text. logprobs: of the tokens, see :class:`~flintc.runtime.sampling.Sampled`.
    reused: tokens of the prompt that were still cached.
    """

    token_ids: tuple[int, ...]
    text: str | None
    prompt_tokens: int
    finish_reason: FinishReason
    path: str
    seed: int
    logprobs: tuple[float, ...]
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a stream and the text it completes (None without a tokenizer); the last has a finish_reason."""

    id: int
    text: str | None
    logprob: float
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: prompt ids, at most ``max_tokens`` more, ids that end it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]

    @property
    def limit(self) -> int:
        """Tokens of the context it may take, prompt and output together."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling and stop ids where a request leaves them out."""

    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()

    def request(self, prompt: tuple[int, ...], options: Options, context: int) -> Request:
        """The request for ``prompt``; UsageError where an option is impossible."""
        temperature = options.get("temperature", self.params.temperature)
        params = SamplingParams(
            temperature=temperature,
            top_p=options.get("top_p", self.params.top_p),
            top_k=options.get("top_k", self.params.top_k),
            seed=options["seed"] if "seed" in options else secrets.randbits(64) if temperature else 0,
        )
        max_tokens = options.get("max_tokens", max(1, context - len(prompt)))
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}: it must be 1 or more")
        return Request(prompt, params, max_tokens, frozenset(options.get("stop_ids", self.stop_ids)))


def read_defaults(folder: Path | None, metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Defaults of a checkpoint.

    folder: where generation_config.json may lie. metadata: config.json or a GGUF file's keys, which name the stop
    ids where generation_config.json does not. CheckpointError where a value is impossible.
    """
    path = None if folder is None else folder / "generation_config.json"
    given = _read(path) if path is not None and path.is_file() else {}
    origin = str(path)
    base = SamplingParams()
    greedy = given.get("do_sample") is False
    try:
        params = SamplingParams(
            temperature=0.0 if greedy else _number(origin, given, "temperature", base.temperature),
            top_p=_number(origin, given, "top_p", base.top_p),
            top_k=int(_number(origin, given, "top_k", base.top_k)),
        )
    except UsageError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    return GenerationDefaults(params, _stop_ids(origin, given) or _stop_ids("the model's config", metadata))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content


def _number(origin: str, given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise CheckpointError(f"{origin}: {key} is {value!r}, expected a number")
    return value


_GGUF_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def _stop_ids(origin: str, given: Mapping[str, Any]) -> frozenset[int]:
    """All ids of ``eos_token_id``, which is a number or a list."""
    value = given.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    ids = [i for i in (*ids, *(given.get(key) for key in _GGUF_STOPS)) if i is not None]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(f"{origin}: eos_token_id is {value!r}, expected token ids")
    return frozenset(ids)
