"""How much of the host's memory a piece of work takes."""

from __future__ import annotations

import threading
from pathlib import Path

_STATUS = Path("/proc/self/status")
_EVERY = 0.01  # seconds


class AnonymousPeak:
    """Watches this process's anonymous memory (RssAnon) while it is entered, by looking every 10 ms.

    Pages of files do not count: the system may drop them at any time.
    """

    def __init__(self) -> None:
        #: Most bytes seen; None where the system does not tell.
        self.nbytes: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="flintc-memory", daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self._look()

    def _look(self) -> None:
        now = anonymous_bytes()
        if now is not None:
            self.nbytes = max(now, self.nbytes or 0)


def anonymous_bytes() -> int | None:
    """RssAnon of this process now; None where the system does not tell."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    kilobytes = next(found, None)
    return None if kilobytes is None else int(kilobytes) * 1024
