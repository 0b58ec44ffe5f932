"""Text to token ids and back; streams text in whole characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from flintc.checkpoint.tokenizer_config import TOKENIZER_CONFIG
from flintc.errors import TokenizerError
from flintc.runtime.chat import ChatTemplate, Message, read_chat_template

#: What decoding puts in place of bytes that are not a whole character.
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A tokenizer and, where the checkpoint has one, its chat template.

    backend: from tokenizer.json, or built from a GGUF file's tokens and merges.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None) -> None:
        self._backend = backend
        self._template = template
        ids = backend.get_vocab(with_added_tokens=True).values()
        #: Ids from here on are padding of the embedding: no text stands for them.
        self.count: int = max(ids, default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with whatever the tokenizer puts around a text."""
        return list(self._backend.encode(text).ids)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> list[int]:
        """Ids of a conversation through the chat template (see :meth:`ChatTemplate.render`)."""
        if self._template is None:
            raise TokenizerError(
                "the checkpoint has no chat template", remedy="use a raw prompt, or pass a folder that has one"
            )
        text = self._template.render(messages, tools, **options)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens; bytes that form no character become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A decoder that takes ids one by one."""
        return TextStream(self)


class TextStream:
    """Text of a growing list of ids, handed out as soon as its characters are whole.

    The pieces, and what ``finish`` returns, add up to the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._sent = ""

    def push(self, token: int) -> str:
        """Text that ``token`` completes, maybe none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = text.removesuffix(_REPLACEMENT)  # the last character may still be completed; those before cannot
        piece = whole[len(self._sent) :]
        self._sent += piece
        if piece and whole == text:
            self._forget(token)
        return piece

    def finish(self) -> str:
        """What is left: U+FFFD where the last bytes form no character."""
        rest = self._tokenizer.decode(self._ids)[len(self._sent) :]
        self._ids, self._sent = [], ""
        return rest

    def _forget(self, token: int) -> None:
        # The last token stays as context: some decoders treat the first token of a text differently.
        self._ids = [token]
        self._sent = self._tokenizer.decode(self._ids)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; TokenizerError where there is none, or an unusable one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file", remedy="pass the folder of a tokenizer")
    content = _read_json(path)
    _refuse_incomplete(path, content)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the package raises nothing more specific
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    config_path = folder / TOKENIZER_CONFIG
    config = _read_json(config_path) if config_path.is_file() else {}
    return Tokenizer(backend, read_chat_template(folder, config))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return content


def _refuse_incomplete(path: Path, content: Mapping[str, Any]) -> None:
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("merges"):
        return
    added = {token.get("content") for token in _dicts(content.get("added_tokens"))}
    if any(len(token) > 1 and token not in added for token in model.get("vocab") or {}):
        raise TokenizerError(f"{path}: incomplete: it has tokens of several characters but no merges that form them")


def _dicts(items: object) -> Iterable[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
