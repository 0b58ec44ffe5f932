"""Tensor data in slices: read by several threads ahead of their use, hashed on request, and brought to the device.

Slices are whole units of a tensor's first axis (rows, or experts) and about ``SLICE_BYTES`` long, so that what is in
memory besides the result depends on the number of threads alone, whatever the size of a tensor or a file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flintc.errors import CheckpointError

#: Prepared copies hold the hashes of slices: who changes this must raise ``prepared.LAYOUT``.
SLICE_BYTES = 8 << 20
THREADS = min(8, len(os.sched_getaffinity(0)))
#: Slices that are read, or wait to be used, at a time.
AHEAD = 2 * THREADS
DAMAGED = "the file is damaged or incomplete; fetch it again"


class DataFile:
    """A regular file, open for reading from its scan on: replacing it is not noticed, cutting it short is an error.

    Read by ``pread``, since a memory map of a file that shrinks kills the process.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` without waiting for a pipe; CheckpointError where it is no regular file or cannot be read."""
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
        status = self.status_now()
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path}: not a regular file")

    def close(self) -> None:
        """Close the file; reads fail from here on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def status_now(self) -> os.stat_result:
        """What the system says of the open file."""
        return os.fstat(self._fd)

    def start(self, most: int) -> bytes:
        """Up to ``most`` of the first bytes."""
        try:
            return os.pread(self._fd, most, 0)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None

    def read_into(self, data: Tensor, offset: int, what: str) -> None:
        """Fill ``data``, u8 on the CPU, with the bytes from ``offset`` on; ``what`` names them in a CheckpointError."""
        view, at = data.numpy().data, 0
        while at < len(view):
            try:
                count = os.preadv(self._fd, [view[at:]], offset + at)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {what} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: the file ends within {what}", remedy=DAMAGED)
            at += count


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a tensor lie. kind: its type in the words of its format; shape: in stored elements."""

    name: str
    file: DataFile
    offset: int
    nbytes: int
    kind: str
    shape: tuple[int, ...]

    def slices(self) -> list[Slice]:
        """The tensor cut along its first axis."""
        return [Slice(self, first, stop) for first, stop in cut(self.shape, self.nbytes)]


@dataclass(frozen=True, slots=True)
class Slice:
    """Units ``first`` to ``stop`` of the first axis of ``extent``."""

    extent: Extent
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return (self.stop - self.first) * self._unit

    @property
    def offset(self) -> int:
        """Where it begins in its file."""
        return self.extent.offset + self.first * self._unit

    @property
    def units(self) -> slice:
        """Its part of the first axis."""
        return slice(self.first, self.stop)

    @property
    def _unit(self) -> int:
        return self.extent.nbytes // (self.extent.shape[0] if self.extent.shape else 1)

    def __str__(self) -> str:
        return f"{self.extent.name}[{self.first}:{self.stop}]"


def cut(shape: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    """First and last-plus-one unit of each slice of a tensor."""
    units = shape[0] if shape else 1
    step = max(1, SLICE_BYTES * units // max(1, nbytes))
    return [(first, min(first + step, units)) for first in range(0, units, step)]


#: Told of the SHA-256 of every slice, by the thread that has read it; what it raises is raised by the reader.
Observer = Callable[[Slice, str], None]


class SliceReader:
    """The data of ``extents``, which must be asked for in that order, on ``device``.

    Threads read ahead while what came before is in use. Close it, or use it as a context.
    """

    def __init__(
        self, extents: Iterable[Extent], device: torch.device | str = "cpu", observer: Observer | None = None
    ) -> None:
        self.nbytes = 0
        # A thread's current GPU is not that of the thread that made it: the index is fixed here.
        self._device = torch.empty(0, device=device).device
        self._observer = observer
        self._staged = threading.local()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="flintc-read")
        self._coming: deque[tuple[Slice, Future[Tensor]]] = deque()
        self._slices = (part for extent in extents for part in extent.slices())
        self._submit(AHEAD)

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the reads that have begun and drop the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def parts(self, extent: Extent) -> Iterator[tuple[slice, Tensor]]:
        """The slices of ``extent``: the part of its first axis, and its bytes, u8 [stop - first, bytes of a unit]."""
        for expected in extent.slices():
            part, data = self._coming.popleft()
            assert part == expected, f"{expected} asked for, {part} read"
            self._submit(1)
            self.nbytes += part.nbytes
            yield part.units, data.result().view(part.stop - part.first, -1)

    def whole(self, extent: Extent) -> Tensor:
        """All bytes of ``extent``, for one that is small: u8 [nbytes]."""
        return torch.cat([data.flatten() for _, data in self.parts(extent)])

    def _submit(self, count: int) -> None:
        for _ in range(count):
            part = next(self._slices, None)
            if part is None:
                return
            self._coming.append((part, self._pool.submit(self._read, part)))

    def _read(self, part: Slice) -> Tensor:
        data = self._buffer(part.nbytes)
        part.extent.file.read_into(data, part.offset, part.extent.name)
        if self._observer is not None:
            self._observer(part, sha256(data))
        return data.to(self._device)

    def _buffer(self, nbytes: int) -> Tensor:
        """Where to read to: for a GPU, page-locked memory of this thread, which is copied at the bus's full rate."""
        if self._device.type == "cpu":
            return torch.empty(nbytes, dtype=torch.uint8)
        buffer: Tensor | None = getattr(self._staged, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = torch.empty(max(nbytes, SLICE_BYTES), dtype=torch.uint8, pin_memory=True)
            self._staged.buffer = buffer
        return buffer[:nbytes]


def sha256(data: Tensor) -> str:
    """Of the bytes of a contiguous tensor on the CPU."""
    return hashlib.sha256(data.flatten().view(torch.uint8).numpy().data).hexdigest()


def in_shape(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Bytes of a slice, u8 [units, n], as ``dtype`` [units, *shape]."""
    return data.view(dtype).reshape(data.shape[0], *shape)
