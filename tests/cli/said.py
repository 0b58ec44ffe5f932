"""What a command leaves behind, and the type of the fixture that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[str]:
        """Lines of standard output, those of tables without their rules: cells with a space between."""
        return [" ".join(line.replace("\u2502", " ").split()) for line in self.out.splitlines()]


Flintc = Callable[..., Said]
