"""Strict reading of JSON data that may come from anywhere: every mistake is a BundleError naming its path."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from flintc.errors import BundleError

MAX_WHOLE = 1 << 53


class Cursor:
    """A place inside JSON data. Its path is only spelled out when something is wrong there."""

    __slots__ = ("_key", "_parent", "data")

    def __init__(self, data: Any, key: str | int = "$", parent: Cursor | None = None) -> None:
        self.data, self._key, self._parent = data, key, parent

    @property
    def path(self) -> str:
        """Where this is, as ``$.ops[3].name``."""
        if self._parent is None:
            return str(self._key)
        return self._parent.path + (f"[{self._key}]" if isinstance(self._key, int) else f".{self._key}")

    def fail(self, message: str) -> NoReturn:
        """Raise BundleError for this place."""
        raise BundleError(f"{self.path}: {message}")

    def record(self, required: frozenset[str], optional: frozenset[str] = frozenset()) -> Cursor:
        """This, if it is an object with all ``required`` keys and none beyond ``optional``."""
        if not isinstance(self.data, dict):
            self.fail("expected an object")
        keys = self.data.keys()
        if keys != required:
            if missing := required - keys:
                self.fail(f"missing {min(missing)!r}")
            if unknown := keys - required - optional:
                self.fail(f"unknown key {min(unknown)!r}")
        return self

    def __getitem__(self, key: str) -> Cursor:
        return Cursor(self.data[key], key, self)

    def get(self, key: str) -> Cursor:
        """The value of an optional key: null where it is absent."""
        return Cursor(self.data.get(key), key, self)

    def __iter__(self) -> Iterator[Cursor]:
        if not isinstance(self.data, list):
            self.fail("expected a list")
        return (Cursor(item, i, self) for i, item in enumerate(self.data))

    def members(self) -> Iterator[tuple[str, Cursor]]:
        """Keys and values of an object of any keys."""
        if not isinstance(self.data, dict):
            self.fail("expected an object")
        return ((key, Cursor(value, key, self)) for key, value in self.data.items())

    def text(self) -> str:
        """A string."""
        if not isinstance(self.data, str):
            self.fail("expected text")
        return self.data

    def texts(self) -> tuple[str, ...]:
        """A list of strings."""
        if not isinstance(self.data, list) or not all(isinstance(item, str) for item in self.data):
            self.fail("expected a list of texts")
        return tuple(self.data)

    def whole(self) -> int:
        """A whole number from 0 up to what every JSON reader holds exactly."""
        if not isinstance(self.data, int) or isinstance(self.data, bool) or not 0 <= self.data < MAX_WHOLE:
            self.fail("expected a whole number below 2^53")
        return self.data

    def maybe_whole(self) -> int | None:
        """A whole number of at least 0, or null."""
        return None if self.data is None else self.whole()

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.data, bool):
            self.fail("expected true or false")
        return self.data

    def scalar(self) -> int | float | str | bool | None:
        """A number, text, boolean or null; numbers are finite."""
        if isinstance(self.data, float) and not math.isfinite(self.data):
            self.fail("expected a finite number")
        if self.data is not None and not isinstance(self.data, int | float | str):
            self.fail("expected a number, text, boolean or null")
        return self.data

    def one_of(self, words: tuple[str, ...]) -> Any:
        """One of ``words``."""
        if self.data not in words:
            self.fail(f"{_short(self.data)} is not one of {', '.join(words)}")
        return self.data

    def known(self, names: Any, what: str) -> str:
        """A string that is in ``names``."""
        name = self.text()
        if name not in names:
            self.fail(f"unknown {what} {_short(name)}")
        return name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
