"""JSON from a checkpoint, read with a bound on its size and no duplicate keys."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from flintc.errors import CheckpointError

#: A sharded Flint's index is about 4 MB, its config.json a few KB.
MAX_JSON = 100 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; CheckpointError where it is missing, too large, damaged or not an object."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")  # reading a pipe would wait for ever
        if status.st_size > MAX_JSON:
            raise CheckpointError(f"{path}: {status.st_size} bytes is too large for a JSON file of a checkpoint")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``data``; ``where`` begins the message of a CheckpointError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice")
    return result
