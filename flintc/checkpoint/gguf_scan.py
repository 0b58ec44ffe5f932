"""A bounded scan of a GGUF file: metadata and tensor directory, without trusting one count in the header.

GGUF version 3, little endian: magic, version, tensor count, metadata count; then the metadata as (key, type, value);
then one directory entry per tensor; then, aligned, the tensor data. Every length is checked against the file and
against fixed limits before anything is allocated or looped over, so that a lying header costs neither time nor memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from flintc.checkpoint.reading import DAMAGED, DataFile, Extent
from flintc.errors import CheckpointError

#: Bytes that metadata and directory may fill; a vocabulary of 150,000 tokens with merges takes about 8 MB.
MAX_HEADER = 64 << 20
#: Array elements in all; a vocabulary takes four for each token.
MAX_VALUES = 1 << 22
MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 18
#: Bytes of a key or a tensor name; ggml allows 64 for the latter.
MAX_NAME = 256
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4

Scalar = int | float | bool | str
MetaValue = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How a tensor stores its values: blocks of ``values`` values in ``nbytes`` bytes."""

    name: str
    values: int
    nbytes: int


F32 = GgmlType("F32", 1, 4)
F16 = GgmlType("F16", 1, 2)
BF16 = GgmlType("BF16", 1, 2)
NVFP4 = GgmlType("NVFP4", 64, 36)
#: By type number in the directory; the types of other architectures' files are looked up in package gguf.
TYPES: dict[int, GgmlType] = {0: F32, 1: F16, 30: BF16, 40: NVFP4}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Directory entry of one tensor. shape: outermost dimension first; offset: from the start of the file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) // self.type.values * self.type.nbytes

    def __str__(self) -> str:
        return f"{self.type.name}{list(self.shape)}"


class GgufFile:
    """A scanned GGUF file: ``metadata``, ``tensors`` by name, and ``data`` to read them from."""

    def __init__(self, path: str | Path) -> None:
        """Scan ``path``. CheckpointError names the place of the first defect."""
        self.path = Path(path)
        self.data = DataFile(self.path)
        scan = _Scan(self.path, self.data.start(MAX_HEADER), self.data.size)
        self.metadata: Mapping[str, MetaValue] = scan.metadata
        self.tensors: Mapping[str, TensorInfo] = scan.tensors

    def extent(self, name: str) -> Extent:
        """Where the bytes of a tensor lie; shape: in blocks of its type."""
        t = self.tensors[name]
        stored = (*t.shape[:-1], t.shape[-1] // t.type.values)
        return Extent(name, self.data, t.offset, t.nbytes, t.type.name, stored)


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
#: The least bytes of a metadata entry (empty key, one-byte value) and of a directory entry (no dimension).
_MIN_ENTRY, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


class _Scan:
    """One pass over the header bytes ``data`` of a file of ``size`` bytes."""

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at = 0
        self._values_left = MAX_VALUES
        if data[:4] != b"GGUF":
            raise CheckpointError(
                f"{path}: not a GGUF file (it does not start with GGUF)", remedy="pass a .gguf file or a folder"
            )
        self._at = 4
        self._version()
        tensor_count = self._count("tensor count", _MIN_TENSOR, MAX_TENSORS)
        entry_count = self._count("metadata count", _MIN_ENTRY, MAX_ENTRIES)
        self.metadata: dict[str, MetaValue] = {}
        for _ in range(entry_count):
            self._entry()
        self._alignment = self._read_alignment()
        self.tensors = self._directory(tensor_count)

    def _fail(self, what: str, at: int | None = None) -> CheckpointError:
        place = self._at if at is None else at
        return CheckpointError(f"{self._path}: byte {place}: {what}", remedy=DAMAGED)

    def _skip(self, count: int, what: str) -> int:
        """Position before ``count`` bytes that belong to the header; the cursor moves behind them."""
        at, end = self._at, self._at + count
        if end > len(self._data):
            if len(self._data) < self._size:
                raise self._fail(f"{what} reaches past the {MAX_HEADER >> 20} MiB that a header may fill")
            raise self._fail(f"the file ends within {what}")
        self._at = end
        return at

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._data, self._skip(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._data, self._skip(8, what))[0]
        return value

    def _count(self, what: str, least: int, most: int) -> int:
        """A number of things that follow, each of at least ``least`` bytes."""
        at = self._at
        count = self._u64(what)
        if count > (self._size - self._at) // least:
            raise self._fail(f"{what} is {count}, more than the file can hold", at)
        if count > most:
            raise self._fail(f"{what} is {count}, more than the {most} that are read", at)
        return count

    def _length(self, key: str, least: int) -> int:
        """The length of an array; lengths add up to at most MAX_VALUES."""
        count = self._count(f"the length of {key!r}", least, self._values_left)
        self._values_left -= count
        return count

    def _text(self, what: str, longest: int) -> str:
        at = self._at
        length = self._u64(f"the length of {what}")
        if length > longest:
            raise self._fail(f"{what} claims {length} bytes", at)
        start = self._skip(length, what)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"{what} is not UTF-8", start) from error

    def _name(self, what: str) -> str:
        """A key or tensor name: not empty, and fit to be shown in a message."""
        at = self._at
        name = self._text(what, MAX_NAME)
        if not name or not name.isprintable():
            raise self._fail(f"{what} is {'not printable' if name else 'empty'}", at)
        return name

    def _version(self) -> None:
        version = self._u32("the version")
        if version != 3:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in (2, 3) else f"GGUF version {version}"
            raise CheckpointError(
                f"{self._path}: byte 4: {kind} is not supported", remedy="write the file as little-endian version 3"
            )

    def _entry(self) -> None:
        at = self._at
        key = self._name("a metadata key")
        if key in self.metadata:
            raise self._fail(f"metadata key {key!r} appears twice", at)
        kind = self._u32(f"the type of {key!r}")
        if kind == _STRING:
            self.metadata[key] = self._text(repr(key), MAX_HEADER)
        elif kind == _ARRAY:
            self.metadata[key] = self._array(key)
        else:
            self.metadata[key] = self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> list[Scalar]:
        kind = self._u32(f"the element type of {key!r}")
        if kind == _STRING:
            return self._strings(key, self._length(key, 8))
        if kind == _ARRAY:
            raise self._fail(f"{key!r} is an array of arrays, which GGUF readers do not accept", self._at - 4)
        return self._numbers(key, kind, None)

    def _numbers(self, key: str, kind: int, count: int | None) -> list[Scalar]:
        """``count`` numbers, or as many as the file says (None)."""
        if kind not in _DTYPES:
            raise self._fail(f"{key!r} has unknown type {kind}", self._at - 4)
        dtype = np.dtype(_DTYPES[kind])
        if count is None:
            count = self._length(key, dtype.itemsize)
        start = self._skip(count * dtype.itemsize, repr(key))
        if kind == _BOOL and np.frombuffer(self._data, np.uint8, count, start).max(initial=0) > 1:
            raise self._fail(f"{key!r} is boolean but holds a byte other than 0 and 1", start)
        values: list[Scalar] = np.frombuffer(self._data, dtype, count, start).tolist()
        return values

    def _strings(self, key: str, count: int) -> list[Scalar]:
        # A vocabulary holds half a million strings: no method call per string.
        data, at, end = self._data, self._at, len(self._data)
        values: list[Scalar] = []
        for index in range(count):
            start = at + 8
            if start > end:
                raise self._fail(f"the file ends within {key!r}[{index}]", at)
            at = start + _U64.unpack_from(data, at)[0]
            if at > end:
                raise self._fail(f"{key!r}[{index}] claims {at - start} bytes", start - 8)
            try:
                values.append(data[start:at].decode())
            except UnicodeDecodeError as error:
                raise self._fail(f"{key!r}[{index}] is not UTF-8", start) from error
        self._at = at
        return values

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        whole = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not whole or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):  # type: ignore[operator]
            raise CheckpointError(
                f"{self._path}: general.alignment is {alignment!r}, not a power of two", remedy=DAMAGED
            )
        assert isinstance(alignment, int)
        return alignment

    def _directory(self, count: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[GgmlType, tuple[int, ...], int]] = {}
        for _ in range(count):
            at = self._at
            name = self._name("a tensor name")
            if name in entries:
                raise self._fail(f"tensor {name!r} appears twice", at)
            shape = self._shape(name)
            kind = self._ggml_type(name)
            if shape[-1] % kind.values:
                raise self._fail(f"{name}: rows of {shape[-1]} values are no whole blocks of {kind.name}", at)
            entries[name] = (kind, shape, self._u64(f"the offset of {name}"))
        first = -(-self._at // self._alignment) * self._alignment
        tensors = {name: TensorInfo(name, k, shape, first + offset) for name, (k, shape, offset) in entries.items()}
        self._check_extents(tensors)
        return tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        """Dimensions, outermost first (the file stores the innermost first)."""
        at = self._at
        rank = self._u32(f"the rank of {name}")
        if not 1 <= rank <= MAX_DIMS:
            raise self._fail(f"{name} has {rank} dimensions; 1 to {MAX_DIMS} are possible", at)
        dims = [self._u64(f"the dimensions of {name}") for _ in range(rank)]
        # No type stores more than 32 values in a byte, which bounds the product long before it grows large.
        if not all(dims) or prod(dims) > self._size * 32:
            raise self._fail(f"{name} has dimensions {dims[::-1]}, which the file cannot hold", at)
        return tuple(reversed(dims))

    def _ggml_type(self, name: str) -> GgmlType:
        at = self._at
        number = self._u32(f"the type of {name}")
        kind = TYPES.get(number) or _foreign_type(number)
        if kind is None:
            raise self._fail(f"{name} has unknown type {number}", at)
        return kind

    def _check_extents(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Every tensor's data lies aligned within the file, and no two share a byte."""
        for t in tensors.values():
            if t.offset % self._alignment:
                raise self._bad_extent(t, f"is not aligned to {self._alignment} bytes")
            if t.offset + t.nbytes > self._size:
                raise self._bad_extent(t, f"reaches past the end of the file ({self._size} bytes)")
        for a, b in pairwise(sorted(tensors.values(), key=lambda t: t.offset)):
            if a.offset + a.nbytes > b.offset:
                raise self._bad_extent(b, f"overlaps {a.name}")

    def _bad_extent(self, t: TensorInfo, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {t.name} {t} at bytes {t.offset} to {t.offset + t.nbytes} {what}", remedy=DAMAGED
        )


def _foreign_type(number: int) -> GgmlType | None:
    """A type that no checkpoint of ours uses, so that its file is refused for what it is, not for this type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return None
    values, nbytes = GGML_QUANT_SIZES[kind]
    return GgmlType(kind.name, values, nbytes)
