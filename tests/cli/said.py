"""What a command leaves behind, and the type of the fixture that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str


Flintc = Callable[..., Said]
