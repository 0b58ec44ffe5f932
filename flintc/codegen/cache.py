"""Where flintc keeps what it can rebuild, and a content-addressed store within it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from flintc.errors import UsageError

_DIGEST = hashlib.sha256().digest_size


def cache_root() -> Path:
    """``$FLINTC_CACHE``, else ``$XDG_CACHE_HOME/flintc``, else ``~/.cache/flintc``; not created.

    A relative ``$XDG_CACHE_HOME`` is ignored, as its specification asks. UsageError where there is no home either.
    """
    if chosen := os.environ.get("FLINTC_CACHE"):
        return Path(chosen).absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "flintc"
    try:
        return Path.home() / ".cache" / "flintc"
    except RuntimeError as error:
        raise UsageError("no home directory to keep the cache in", remedy="set FLINTC_CACHE to a folder") from error


def package_digest() -> str:
    """Hash of the text of this package: of all that decides what it makes of the same input."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".j2", ".yaml")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Store:
    """Byte strings in files named by key, each preceded by its own hash.

    A damaged or half-written entry reads as absent. A store that cannot be written is one that holds nothing: losing
    a cache must never lose the work.
    """

    folder: Path

    def get(self, key: str) -> bytes | None:
        """The entry, or None where there is none that is whole."""
        try:
            stored = self._path(key).read_bytes()
        except OSError:
            return None
        data = stored[_DIGEST:]
        return data if hashlib.sha256(data).digest() == stored[:_DIGEST] else None

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` whole or not at all."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, hashlib.sha256(data).digest() + data)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that no reader, and no crash, ever sees a part of it."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
