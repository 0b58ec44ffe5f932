"""What a checkpoint says besides its weights: tokenizer, chat template, generation defaults."""

from __future__ import annotations

from pathlib import Path

from flintc.checkpoint import Checkpoint
from flintc.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from flintc.errors import TokenizerError
from flintc.runtime.chat import ChatTemplate
from flintc.runtime.generation import GenerationDefaults, read_defaults
from flintc.runtime.tokenizer import Tokenizer, load_tokenizer


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
