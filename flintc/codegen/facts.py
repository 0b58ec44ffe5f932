"""What is known of a value in a kernel without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of one value.

    pointers: parameters it may point into. data: parameters whose memory it was computed from. last: where it is true,
    the program is the last arriver at these counters, the first one met first. flag: its truth, if known beforehand.
    first: if it is the first position that a step writes of a sequence, and nothing computed from it, the parameters
    that hold the rows' positions and sequences.
    """

    pointers: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    last: tuple[str, ...] | None = None
    flag: bool | None = None
    first: tuple[str, ...] = ()


Value = Fact | tuple["Value", ...]

NOTHING = Fact()


def joined(values: Iterable[Value]) -> Fact:
    """What is known of something computed from ``values``; of a single one, all that is known of it."""
    facts = [f for value in values for f in ([value] if isinstance(value, Fact) else [joined(value)])]
    if len(facts) == 1:
        return facts[0]
    return Fact(frozenset().union(*(f.pointers for f in facts)), frozenset().union(*(f.data for f in facts)))


def computed(fact: Fact) -> Fact:
    """What is known of something computed from what ``fact`` is known of: where it comes from, not what it says."""
    return Fact(fact.pointers, fact.data)


def either(values: Sequence[Value]) -> Fact:
    """The conjunction of ``values``: where it is true, what any of them says holds."""
    facts = [joined((v,)) for v in values]
    both = joined(facts)
    last = max((f.last for f in facts if f.last is not None), key=len, default=None)
    flags = [f.flag for f in facts]
    flag = False if False in flags else (True if all(flags) else None)
    return Fact(both.pointers, both.data, last, flag)


def merged(one: Mapping[str, Value], other: Mapping[str, Value]) -> dict[str, Value]:
    """Variables after two ways that meet again."""
    return {name: _merge(one.get(name), other.get(name)) for name in {**one, **other}}


def _merge(a: Value | None, b: Value | None) -> Value:
    if a is None or b is None:
        return a if a is not None else b or NOTHING
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_merge(x, y) for x, y in zip(a, b, strict=True))
    one, two = joined((a,)), joined((b,))
    flag = one.flag if one.flag == two.flag else None
    return Fact(one.pointers | two.pointers, one.data | two.data, _common(one.last, two.last), flag)


def _common(a: tuple[str, ...] | None, b: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The part of two chains of counters that both begin with."""
    if a is None or b is None:
        return None
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length] or None


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as written; empty for anything but names and attributes."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=base, attr=attr):
            before = dotted(base)
            return f"{before}.{attr}" if before else ""
    return ""
