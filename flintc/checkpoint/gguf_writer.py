"""Writes a GGUF file tensor by tensor, holding one tensor at a time; the file appears when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import mkstemp

import gguf
import numpy as np
from torch import Tensor

from flintc.checkpoint.gguf_scan import GgmlType, MetaValue
from flintc.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written. shape: outermost dimension first, rows a whole number of blocks of ``type``."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) // self.type.values * self.type.nbytes


def write_gguf(
    path: Path, metadata: Mapping[str, MetaValue], planned: Sequence[PlannedTensor], data: Iterable[Tensor]
) -> None:
    """Write ``metadata`` and, in the order of ``planned``, the bytes of each tensor (u8, on the CPU).

    UsageError where ``path`` exists, cannot be written, or the disk is too small; then, and when ``data`` fails,
    nothing is left behind.
    """
    with new_file(path, sum(t.nbytes for t in planned)) as temporary:
        writer = gguf.GGUFWriter(temporary, metadata["general.architecture"])
        for key, value in metadata.items():
            if key != "general.architecture":
                _add(writer, key, value)
        for t in planned:
            stored = gguf.GGMLQuantizationType[t.type.name]
            writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=stored)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for t, tensor in zip(planned, data, strict=True):
                assert tensor.nbytes == t.nbytes, t.name
                writer.write_tensor_data(tensor.contiguous().numpy())
        finally:
            writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: MetaValue) -> None:
    """Types as published files have them: UINT32, FLOAT32, BOOL, STRING, and arrays of these."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_int64)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


@contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[Path]:
    """A file to fill, renamed to ``path`` at the end; on an error it is removed and ``path`` never appears.

    UsageError where ``path`` exists, its folder cannot be written, or ``nbytes`` do not fit.
    """
    if path.exists():
        raise UsageError(f"{path} exists already", remedy="name a new file, or remove this one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}") from None
    os.close(handle)
    temporary = Path(name)
    try:
        free = shutil.disk_usage(path.parent).free
        if nbytes > free:
            raise UsageError(f"{path}: {nbytes / 1e9:.1f} GB do not fit the {free / 1e9:.1f} GB that are free there")
        yield temporary
        temporary.chmod(0o644)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
