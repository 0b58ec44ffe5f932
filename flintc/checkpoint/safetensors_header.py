"""The header of a .safetensors file, checked against the file before anything relies on it.

Layout: the header's length (8 bytes, little endian), the header (JSON: tensor name -> dtype, shape, data_offsets),
the data. Offsets count from the start of the data; the format allows neither holes nor overlaps.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from flintc.checkpoint.json_file import parse_object
from flintc.errors import CheckpointError

MAX_HEADER = 100_000_000
DAMAGED = "the file is damaged or incomplete; fetch it again"

#: Bytes per value; tensors of other types are listed too, and refused when a weight needs them.
VALUE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is; dtype in the words of the format (``BF16``, ``F32``, ...)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name; CheckpointError names the file, the tensor and what is wrong."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            if length is None or length > min(MAX_HEADER, status.st_size - 8):
                raise CheckpointError(f"{path}: the header does not fit the file", remedy=DAMAGED)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    entries = parse_object(text, f"{path}: header")
    entries.pop("__metadata__", None)
    _check_layout(path, entries, status.st_size - 8 - length)
    return {name: StoredTensor(name, path, e["dtype"], tuple(e["shape"])) for name, e in entries.items()}


def _check_layout(path: Path, entries: Mapping[str, Any], data_bytes: int) -> None:
    """Every entry well formed, and the tensors' bytes filling the data exactly."""
    spans = sorted((*_span(path, name, entry), name) for name, entry in entries.items())
    end = 0
    for begin, stop, name in spans:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {name} {what}", remedy=DAMAGED)
        end = stop
    if end != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes} bytes of data, its header describes {end}", remedy=DAMAGED)


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """First and last-plus-one byte of a tensor."""
    well_formed = (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and _are_counts(entry.get("shape"))
        and _are_counts(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    )
    if not well_formed:
        raise CheckpointError(f"{path}: tensor {name} has a malformed header entry", remedy=DAMAGED)
    begin, stop = entry["data_offsets"]
    size = VALUE_BYTES.get(entry["dtype"])
    if begin > stop or (size is not None and prod(entry["shape"]) * size != stop - begin):
        message = f"{path}: tensor {name}: {entry['dtype']}{entry['shape']} does not take bytes {begin}..{stop}"
        raise CheckpointError(message, remedy=DAMAGED)
    return begin, stop


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 60 for v in values)
