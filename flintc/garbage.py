"""When Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is looked for in the block; what was made in it is then looked at as rarely as what is old.

    For work that makes objects by the hundred thousand, all of which stay: looking through them takes up to a third of
    its time. In a block within such a block nothing changes, nor where the program collects no garbage.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Make every object one of those that have been looked at in vain; garbage among them is still found."""
    if not gc.get_freeze_count():  # what a program has frozen itself stays so
        gc.freeze()
        gc.unfreeze()
