"""Tokenizer, chat template and stop ids, between a checkpoint folder and GGUF metadata."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from flintc.checkpoint.gguf_scan import MetaValue
from flintc.checkpoint.gguf_tokenizer import tokenizer_from_gguf, tokenizer_to_gguf
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.safetensors_folder import inside
from flintc.checkpoint.tokenizer_config import TEMPLATE, TOKENIZER_CONFIG, find_template, special_tokens
from flintc.errors import CheckpointError

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"


def folder_text(metadata: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Files of a folder, name -> content, that say what a GGUF file's metadata says about text.

    The second value says what could not be carried over, if anything.
    """
    found = tokenizer_from_gguf(metadata)
    files = {}
    if found.backend is not None:
        files[TOKENIZER] = found.backend.to_str()
        files[TOKENIZER_CONFIG] = _json(dict(found.special_tokens))
    if found.chat_template is not None:
        files[TEMPLATE] = found.chat_template
    if found.stop_ids:
        files[GENERATION] = _json({"eos_token_id": list(found.stop_ids)})
    return files, found.missing


def gguf_text(folder: Path, vocab_size: int) -> tuple[dict[str, MetaValue], str | None]:
    """GGUF metadata that says what the files in ``folder`` say about text; the second value as above."""
    path = folder / TOKENIZER
    if not path.is_file():
        return {}, f"{path}: no such file"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
        template, _ = find_template(folder, config) or (None, None)
        bos = special_tokens(config).get("bos_token")
        return tokenizer_to_gguf(backend, vocab_size, _stop_ids(folder), template, bos), None
    except CheckpointError:
        raise
    except Exception as error:  # package tokenizers raises nothing more specific
        return {}, f"{path}: {error}"


def copy_text(source: Path, target: Path) -> None:
    """Copy the files of folder ``source`` that concern text."""
    for name in (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION):
        if (source / name).exists():
            shutil.copyfile(inside(source, name), target / name)


def _stop_ids(folder: Path) -> list[int]:
    for name in (GENERATION, "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            found = [i for i in ids if type(i) is int]
            if found:
                return found
    return []


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"
