"""What a checkpoint folder says beside its tokenizer: the chat template, and the texts of special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def find_template(folder: Path, config: Mapping[str, Any]) -> tuple[str, Path] | None:
    """The default chat template and its file: chat_template.jinja, else tokenizer_config.json (``config``).

    None where neither has one.
    """
    path = folder / TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8"), path
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
    return (source, folder / TOKENIZER_CONFIG) if isinstance(source, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts that a chat template may use, such as ``bos_token``, of a tokenizer_config.json."""
    return {name: text for name, value in config.items() if (text := _token_text(name, value)) is not None}


def _token_text(name: str, value: object) -> str | None:
    """Text of an entry such as ``"eos_token": "<|end|>"`` or ``"eos_token": {"content": "<|end|>", ...}``."""
    if not name.endswith("_token"):
        return None
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
