"""Writes .safetensors shards and their index tensor by tensor, holding one tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flintc.checkpoint.safetensors_folder import INDEX, SINGLE

#: Words of the format, and bytes per value.
DTYPES = {
    torch.bfloat16: ("BF16", 2),
    torch.float32: ("F32", 4),
    torch.float8_e4m3fn: ("F8_E4M3", 1),
    torch.uint8: ("U8", 1),
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * DTYPES[self.dtype][1]


def write_shards(
    folder: Path, planned: Sequence[PlannedTensor], tensors: Iterable[Tensor], shard_bytes: int
) -> list[Path]:
    """Write ``tensors``, which come in the order of ``planned``, and return the files made.

    One model.safetensors where ``shard_bytes`` of data suffice, else numbered shards and their index.
    """
    shards = _cut(planned, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _from_1(shards)]
    source = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, source)
    assert next(source, None) is None, "more tensors than planned"
    files = [folder / name for name in names]
    if len(shards) > 1:
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in planned)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        files.append(folder / INDEX)
    return files


def _from_1(items: Sequence[object]) -> range:
    return range(1, len(items) + 1)


def _cut(planned: Sequence[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """Consecutive tensors of at most ``shard_bytes`` together; a larger one has a shard to itself."""
    shards: list[list[PlannedTensor]] = [[]]
    room = shard_bytes
    for tensor in planned:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def file_header(planned: Sequence[PlannedTensor]) -> bytes:
    """What a file that holds ``planned`` begins with; their data follows in that order, without a gap."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in planned:
        header[t.name] = {"dtype": DTYPES[t.dtype][0], "shape": t.shape, "data_offsets": (end, end + t.nbytes)}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_file(path: Path, shard: Sequence[PlannedTensor], source: Iterator[Tensor]) -> None:
    with path.open("wb") as file:
        file.write(file_header(shard))
        for t in shard:
            tensor = next(source)
            assert tensor.shape == t.shape and tensor.dtype == t.dtype, t.name
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
