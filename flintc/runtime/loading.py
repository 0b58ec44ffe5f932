"""What a model takes from a checkpoint: weights, tokenizer, chat template, generation defaults."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flintc.checkpoint import Checkpoint
from flintc.checkpoint.checkpoint import Progress
from flintc.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from flintc.codegen.cache import cache_root
from flintc.errors import CapacityError, TokenizerError, UsageError
from flintc.ir.graph import Graph
from flintc.reference import Nvfp4
from flintc.runtime.chat import ChatTemplate
from flintc.runtime.generation import GenerationDefaults, read_defaults
from flintc.runtime.tokenizer import Tokenizer, load_tokenizer
from flintc.spec import BoundModel


def prepared_root(prepared: str | Path | bool | None, numerics: str) -> Path | None:
    """Where prepared copies of weights are kept: the folder given, the cache's own for True, None for no copies.

    UsageError for FP32 numerics, since copies are rounded.
    """
    if prepared and numerics == "fp32":
        raise UsageError("prepared copies are rounded: they are no source for fp32", remedy="load without prepared")
    if prepared is True:
        return cache_root() / "prepared"
    try:
        return Path(prepared).expanduser() if prepared else None
    except RuntimeError:
        raise UsageError(f"prepared is {prepared}: there is no such user, or no home directory") from None


def load_weights(
    checkpoint: Checkpoint,
    graph: Graph,
    model: BoundModel,
    device: str,
    prepared: Path | None = None,
    progress: Progress | None = None,
    *,
    keep_fp32: bool = False,
) -> dict[str, Tensor | Nvfp4]:
    """Every weight of ``graph`` on ``device``, and in ``checkpoint.report`` what that took.

    prepared: the folder of prepared copies to read from, or to keep one in; not with ``keep_fp32``. Raises
    CheckpointError, and CapacityError where they are larger than the free memory of the GPU.
    """
    if device == "cuda":
        check_fit(graph)
        torch.cuda.reset_peak_memory_stats()
    if prepared is None:
        weights = checkpoint.load(graph, model, device, progress, keep_fp32=keep_fp32)
    else:
        from flintc.checkpoint.prepared import load_prepared

        assert not keep_fp32
        weights = load_prepared(checkpoint, graph, model, prepared, device, progress)
    checkpoint.report.weight_bytes = sum(weight.nbytes for weight in weights.values())
    if device == "cuda":
        checkpoint.report.device_peak = torch.cuda.max_memory_allocated()
    return weights


def check_fit(graph: Graph) -> None:
    """CapacityError where the weights of ``graph`` are larger than the free memory of the GPU."""
    from flintc.runtime.cuda.capacity import free_bytes

    needed = sum(v.type.nbytes({}) for v in graph.values.values() if v.kind == "weight")
    free = free_bytes()
    if needed > free:
        raise CapacityError(
            f"the weights take {needed / 1e9:.1f} GB; {free / 1e9:.1f} GB of the GPU's memory are free",
            remedy="use NVFP4 weights or a GPU with more memory",
        )


def find_tokenizer(
    checkpoint: Checkpoint, chosen: Path | None = None, config: Path | None = None
) -> Tokenizer | TokenizerError:
    """The tokenizer of ``checkpoint``, or why there is none.

    chosen: folder named by the user; a mistake there is raised. config: folder with the config used in place of the
    checkpoint's own; its tokenizer serves a checkpoint without one.
    """
    if chosen is not None:
        return load_tokenizer(chosen)
    own = _own_tokenizer(checkpoint)
    if isinstance(own, TokenizerError) and config is not None and (config / "tokenizer.json").is_file():
        return _attempt(config)
    return own


def find_defaults(checkpoint: Checkpoint, config: Path | None = None) -> GenerationDefaults:
    """Sampling defaults and stop ids, from generation_config.json beside the config, else from the metadata."""
    folder = config or checkpoint.path
    return read_defaults(folder if folder.is_dir() else folder.parent, checkpoint.metadata)


def _own_tokenizer(checkpoint: Checkpoint) -> Tokenizer | TokenizerError:
    if checkpoint.path.is_dir():
        return _attempt(checkpoint.path)
    found = tokenizer_from_gguf(checkpoint.metadata)
    if found.backend is None:
        return TokenizerError(f"{checkpoint.path}: {found.missing}", remedy="pass the folder of a tokenizer")
    if found.chat_template is None:
        return Tokenizer(found.backend)
    try:
        template = ChatTemplate(found.chat_template, str(checkpoint.path), found.special_tokens)
    except TokenizerError as error:
        return error
    return Tokenizer(found.backend, template)


def _attempt(folder: Path) -> Tokenizer | TokenizerError:
    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        return error
