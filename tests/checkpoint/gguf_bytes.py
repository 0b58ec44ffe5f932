"""GGUF files byte by byte, so that tests can lie in any field."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I32, F32_, BOOL, STRING, ARRAY, U64 = 0, 5, 6, 7, 8, 9, 10
U32 = 4


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(kind: int, values: list[bytes], count: int | None = None) -> bytes:
    return u32(kind) + u64(len(values) if count is None else count) + b"".join(values)


def tensor(name: str | bytes, dims: list[int], kind: int, offset: int, rank: int | None = None) -> bytes:
    """Directory entry; ``dims`` innermost first, as stored."""
    return text(name) + u32(len(dims) if rank is None else rank) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


@dataclass
class Gguf:
    """Parts of a file; any count may be overridden."""

    entries: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    entry_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        entries = len(self.entries) if self.entry_count is None else self.entry_count
        start = self.magic + u32(self.version) + u64(tensors) + u64(entries)
        return start + b"".join(self.entries) + b"".join(self.tensors)

    def __bytes__(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data
