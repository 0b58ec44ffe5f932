"""Folders that get their name when they are whole, and what is done with those of processes that were killed."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

_PREFIX, _LOCK = ".flintc-unfinished-", "lock"


@contextmanager
def unfinished(root: Path) -> Iterator[Path]:
    """An empty folder below ``root`` to write in and then to rename; what is left of it is removed at the end.

    So is what lies beside it, and first whatever processes that were killed have left in ``root``. A lock says that a
    writer lives: the system drops it with the process.
    """
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    outer = Path(mkdtemp(prefix=_PREFIX, dir=root))
    try:
        with (outer / "new").open("wb") as lock:
            # The file is given its name once it is locked: no other process finds it free. Where the file system knows
            # no locks it stays unnamed, and the folder is never swept.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                (outer / "new").rename(outer / _LOCK)
            folder = outer / "folder"
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def _sweep(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), path.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
