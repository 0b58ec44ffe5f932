"""The header of a .safetensors file, checked against the file before anything relies on it.

Layout: the header's length (8 bytes, little endian), the header (JSON: tensor name -> dtype, shape, data_offsets),
the data. Offsets count from the start of the data; the format allows neither holes nor overlaps.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from flintc.checkpoint.json_file import parse_object
from flintc.checkpoint.reading import DAMAGED, DataFile, Extent
from flintc.errors import CheckpointError

MAX_HEADER = 100_000_000

#: Bytes per value; tensors of other types are listed too, and refused when a weight needs them.
VALUE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def read_header(path: Path) -> dict[str, Extent]:
    """Tensors of one file by name, of kinds in the words of the format (``BF16``, ``F32``, ...).

    CheckpointError names the file, the tensor and what is wrong.
    """
    file = DataFile(path)
    start = file.start(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
    if length is None or length > min(MAX_HEADER, file.size - 8):
        raise CheckpointError(f"{path}: the header does not fit the file", remedy=DAMAGED)
    entries = parse_object(file.start(8 + length)[8:], f"{path}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ of the header must map names to texts", remedy=DAMAGED)
    spans = _check_layout(path, entries, file.size - 8 - length)
    tensors = {}
    for begin, stop, name in spans:
        dtype, shape = entries[name]["dtype"], tuple(entries[name]["shape"])
        tensors[name] = Extent(name, file, 8 + length + begin, stop - begin, dtype, shape)
    return tensors


def _check_layout(path: Path, entries: Mapping[str, Any], data_bytes: int) -> list[tuple[int, int, str]]:
    """First and last-plus-one byte of each tensor, if every entry is well formed and they fill the data exactly."""
    spans = sorted((*_span(path, name, entry), name) for name, entry in entries.items())
    end = 0
    for begin, stop, name in spans:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {name} {what}", remedy=DAMAGED)
        end = stop
    if end != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes} bytes of data, its header describes {end}", remedy=DAMAGED)
    return spans


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
