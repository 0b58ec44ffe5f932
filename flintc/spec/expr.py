"""Arithmetic on dimensions and numbers: a small, bounded language with no way out of it.

Numbers, names, parentheses and ``+ - * / // **``. Nothing is ever passed to Python's ``eval``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

MAX_LENGTH = 200
MAX_NODES = 60
MAX_EXPONENT = 64
MAX_MAGNITUDE = 2.0**62

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class ExprError(ValueError):
    """An expression is malformed or has no value. ``name`` is the unknown name, where that is the reason."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


_SYNTAX = (ast.Name, ast.Load, ast.UnaryOp, ast.USub, ast.BinOp, *_OPERATORS)


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ExprError(f"expression is longer than {MAX_LENGTH} characters")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExprError(f"{text!r} is not an expression") from None
    nodes = list(ast.walk(body))
    if len(nodes) > MAX_NODES:
        raise ExprError("expression has too many terms")
    for node in nodes:
        allowed = type(node.value) in (int, float) if isinstance(node, ast.Constant) else isinstance(node, _SYNTAX)
        if not allowed:
            raise ExprError(f"{text!r}: only numbers, names and + - * / // ** are allowed")
    return body


def names_in(text: str) -> frozenset[str]:
    """Names that ``text`` reads; ExprError where it is not an expression."""
    return frozenset(n.id for n in ast.walk(_parse(text)) if isinstance(n, ast.Name))


def evaluate(text: str | Number, names: Mapping[str, Number]) -> Number:
    """Value of ``text`` with its names taken from ``names``.

    ``/`` between whole numbers must divide exactly. ExprError says what is wrong.
    """
    if not isinstance(text, str):
        return text
    return _value(_parse(text), names, text)


def _value(node: ast.expr, names: Mapping[str, Number], text: str) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(number, text)
        case ast.Name(id=name):
            if name not in names:
                raise ExprError(f"unknown name {name!r}", name)
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names, text)
        case ast.BinOp(left=left, op=op, right=right):
            return _combine(op, _value(left, names, text), _value(right, names, text), text)
    raise AssertionError(f"{ast.dump(node)} passed the check of its syntax")


def _combine(op: ast.operator, a: Number, b: Number, text: str) -> Number:
    if isinstance(op, ast.Pow) and abs(b) > MAX_EXPONENT:
        raise ExprError(f"{text!r}: exponent {b} is too large")
    if isinstance(op, ast.Div) and isinstance(a, int) and isinstance(b, int) and b != 0:
        if a % b:
            raise ExprError(f"{text!r}: {b} does not divide {a}")
        return a // b
    try:
        value = _OPERATORS[type(op)](a, b)
    except ZeroDivisionError:
        raise ExprError(f"{text!r}: division by zero") from None
    except OverflowError:
        raise ExprError(f"{text!r}: the value is too large") from None
    return _bounded(value, text)


def _bounded(value: Number, text: str) -> Number:
    if isinstance(value, complex) or not abs(value) <= MAX_MAGNITUDE:
        raise ExprError(f"{text!r}: the value is too large or not a number")
    return value
