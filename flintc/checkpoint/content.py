"""What a checkpoint's tensors hold, as one hash, and how it is known again without reading them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flintc.checkpoint.checkpoint import Progress
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.reading import DataFile, Extent, Slice, SliceReader
from flintc.errors import CheckpointError

#: A file that was changed less than this before it was looked at may change again within one tick of its file system's
#: clock, which nobody could see: it is not remembered.
SETTLED_NS = 2_000_000_000


class SliceHashes:
    """An observer of a :class:`SliceReader` that keeps the SHA-256 of every slice."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], str] = {}

    def __call__(self, part: Slice, digest: str) -> None:
        self._of[part.extent.name, part.first] = digest

    def content(self, extents: Iterable[Extent]) -> str:
        """One hash of names, types, shapes and bytes of ``extents``, in whichever files and order they lie."""
        tensors = [(e.name, e.kind, e.shape, [self._of[e.name, s.first] for s in e.slices()]) for e in extents]
        return digest(sorted(tensors))


def digest(value: object) -> str:
    """SHA-256 of ``value`` as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_content(extents: Sequence[Extent], progress: Progress | None = None) -> str:
    """The hash of ``extents``, all of which are read; ``progress`` is told of each."""
    hashes = SliceHashes()
    with SliceReader(extents, observer=hashes) as source:
        for done, extent in enumerate(extents, 1):
            for _ in source.parts(extent):
                pass
            if progress is not None:
                progress(done, len(extents), f"hash of {extent.name}")
    return hashes.content(extents)


class Memory:
    """Remembers the content of files by what a look at them shows, as git does: path, inode, size, times of change.

    The time of the last change of status cannot be set by programs, so a file that was written to, replaced, moved or
    copied does not look the same.
    """

    def __init__(self, folder: Path, files: Sequence[DataFile]) -> None:
        self._looked = time.time_ns()
        self._files = files
        self._look = _look(files)
        self._path = folder / f"{digest([path for path, *_ in self._look])[:32]}.json"

    def recall(self) -> str | None:
        """The content of the files if they look as when it was remembered."""
        with suppress(CheckpointError):
            known: dict[str, Any] = read_json(self._path)
            if known.get("files") == self._look and isinstance(known.get("content"), str):
                return str(known["content"])
        return None

    def remember(self, content: str) -> None:
        """Keep ``content``, unless the files have changed since they were looked at, or just before."""
        settled = all(self._looked - file.status_now().st_ctime_ns >= SETTLED_NS for file in self._files)
        if not settled or _look(self._files) != self._look:
            return
        partial = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps({"files": self._look, "content": content}, indent=1), encoding="utf-8")
            partial.replace(self._path)
        finally:
            partial.unlink(missing_ok=True)


def _look(files: Sequence[DataFile]) -> list[list[str | int]]:
    looks: list[list[str | int]] = []
    for file in files:
        now = file.status_now()
        looks.append([os.path.realpath(file.path), now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns])
    return sorted(looks)
