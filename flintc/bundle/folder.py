"""Reading and writing a bundle's folder, trusting nothing that lies in it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from flintc.errors import BundleError
from flintc.unfinished import unfinished

MANIFEST = "manifest.json"
PLAN = "plan.json"
KERNELS = "kernels"

#: Far above any real bundle (Flint's is some megabytes), far below what would harm a machine.
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 10_000


class Folder:
    """An open bundle folder. Only regular files directly in it or in ``kernels`` exist; links are never followed."""

    def __init__(self, path: Path, root: int, kernels: int) -> None:
        self.path = path
        self._handles = {"": root, KERNELS: kernels}
        self._left = MAX_TOTAL_BYTES

    def names(self) -> set[str]:
        """Every entry, as ``name`` or ``kernels/name``; BundleError if there are too many."""
        found: set[str] = set()
        for folder, handle in self._handles.items():
            with os.scandir(handle) as entries:
                for entry in entries:
                    found.add(f"{folder}/{entry.name}" if folder else entry.name)
                    if len(found) > MAX_FILES:
                        raise BundleError(f"{self.path} holds more than {MAX_FILES} files")
        return found - {KERNELS}

    def read(self, name: str) -> bytes:
        """Content of one file; BundleError if it is missing, no regular file, or too large."""
        folder, _, base = name.rpartition("/")
        limit = min(MAX_FILE_BYTES, self._left)
        try:
            # Non-blocking: opening a pipe would wait for its writer.
            handle = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._handles[folder])
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise BundleError(f"{self.path / name} is not a regular file")
                with os.fdopen(handle, "rb", closefd=False) as file:
                    data = file.read(limit + 1)
            finally:
                os.close(handle)
        except OSError as error:
            raise BundleError(f"cannot read {self.path / name}: {error.strerror}") from error
        if len(data) > limit:
            raise BundleError(f"{self.path / name} is larger than any bundle's file")
        self._left -= len(data)
        return data


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """Open a bundle folder for reading; BundleError if there is none."""
    with contextlib.ExitStack() as opened:

        def open_directory(name: str | Path, flags: int, parent: int | None = None) -> int:
            try:
                handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | flags, dir_fd=parent)
            except OSError as error:
                where = "" if parent is None else f"{path / name}: "
                raise BundleError(
                    f"no bundle at {path}: {where}{error.strerror}", remedy="flintc compile makes one"
                ) from error
            opened.callback(os.close, handle)
            return handle

        root = open_directory(path, 0)
        yield Folder(path, root, open_directory(KERNELS, os.O_NOFOLLOW, root))


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make ``path`` a folder of exactly ``files``, whole or not at all; an older bundle there is replaced.

    BundleError if something else lies there, or it cannot be written.
    """
    try:
        path = path.resolve()
        if not _may_replace(path):
            raise BundleError(
                f"{path} exists and is not a bundle", remedy="choose another folder, or empty it yourself"
            )
        with unfinished(path.parent) as staging:
            (staging / KERNELS).mkdir()
            for name, data in files.items():
                (staging / name).write_bytes(data)
            _swap(staging, path)
    except OSError as error:
        raise BundleError(f"cannot write the bundle {path}: {error.strerror}") from error


def _may_replace(path: Path) -> bool:
    """True where nothing, an empty folder, or a bundle (even a damaged one) and nothing else lies."""
    if not path.exists():
        return True
    if not path.is_dir():
        return False
    entries = {entry.name for entry in path.iterdir()}
    return not entries or (MANIFEST in entries and entries <= {MANIFEST, PLAN, KERNELS})


def _swap(staging: Path, path: Path) -> None:
    """Put ``staging`` in the place of ``path``, which comes to lie beside it; keep ``path`` should that fail."""
    if not path.exists() or not any(path.iterdir()):
        staging.rename(path)
        return
    old = staging.with_name(staging.name + ".old")
    path.rename(old)
    try:
        staging.rename(path)
    except OSError:
        old.rename(path)
        raise
