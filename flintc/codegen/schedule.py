"""How a kernel is laid out where a measurement says better than the rules: data, found by ``flintc tune``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

#: Measured on one H200; other targets take the same until they have a file of their own.
_FILE = "schedules/sm_90.yaml"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a kernel's layout is told; None leaves it to the rules of its family.

    warps: of a program. registers: most of a thread, 0 for no limit. several: the same in steps of more than one row,
    whose programs are many: there it may count more how many fit a multiprocessor.
    """

    warps: int | None = None
    registers: int | None = None
    several: int | None = None


_TRIED: ContextVar[Schedule | None] = ContextVar("tried", default=None)


@cache
def stored() -> Mapping[str, Mapping[str, Any]]:
    """The entries in this package, by kernel name: a schedule, and the figures that chose it."""
    text = resources.files("flintc.codegen").joinpath(_FILE).read_text(encoding="utf-8")
    return yaml.safe_load(text) or {}


def schedule_of(kernel: str) -> Schedule:
    """What the kernel called ``kernel`` is told; a name holds role, sizes and format."""
    if (given := tried()) is not None:
        return given
    entry = stored().get(kernel, {})
    return Schedule(entry.get("warps"), entry.get("registers"), entry.get("several"))


def tried() -> Schedule | None:
    """What every kernel is given at present in place of its own."""
    return _TRIED.get()


@contextmanager
def trying(schedule: Schedule) -> Iterator[None]:
    """Give every kernel ``schedule`` instead of its own, as ``flintc tune`` does with one candidate after the other."""
    token = _TRIED.set(schedule)
    try:
        yield
    finally:
        _TRIED.reset(token)
