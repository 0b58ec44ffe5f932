"""Runs the few PTX instructions on 32-bit words that the dequantisation consists of, as the manual defines them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import torch

import flintc.codegen.device

Words = dict[str, np.ndarray]

DEVICE = Path(flintc.codegen.device.__file__).parent


def assembly_of(module: str, function: str) -> str:
    """The text of the one inline assembly in a device function."""
    tree = ast.parse((DEVICE / f"{module}.py").read_text(encoding="utf-8"))
    (body,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    texts = [
        n.args[0].value
        for n in ast.walk(body)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "inline_asm_elementwise"
        if isinstance(n.args[0], ast.Constant)
    ]
    (text,) = texts
    assert isinstance(text, str)
    return text


def run(text: str, **given: np.ndarray) -> Words:
    """Values of all registers and operands after ``text``; ``given`` operands are named ``o8`` for ``$8``."""
    values: Words = {name.replace("o", "$", 1): array.astype(np.uint32) for name, array in given.items()}
    for line in text.replace("{\n", "\n", 1).rstrip("} \n").split(";"):
        statement = line.strip()
        if statement and not statement.startswith(".reg"):
            operation, rest = statement.split(None, 1)
            _step(operation, [t.strip() for t in re.split(r",(?![^{]*})", rest)], values)
    return values


def _step(operation: str, operands: list[str], values: Words) -> None:
    target, sources = operands[0], [_value(s, values) for s in operands[1:]]
    if target.startswith("{"):
        low, high = (t.strip() for t in target.strip("{}").split(","))
        values[low], values[high] = sources[0] & np.uint32(0xFFFF), sources[0] >> np.uint32(16)
        return
    match operation:
        case "mov.b32":
            result = sources[0]
        case "shl.b32":
            result = sources[0] << sources[1]
        case "shf.l.wrap.b32":
            high, low, by = sources
            result = (high << by) | (low >> (np.uint32(32) - by))
        case "and.b32":
            result = sources[0] & sources[1]
        case "or.b32":
            result = sources[0] | sources[1]
        case "prmt.b32":
            result = _permute(*sources)
        case "mul.rn.bf16x2":
            result = _halves_product(*sources)
        case _:
            raise AssertionError(f"{operation} is not known here")
    values[target] = result.astype(np.uint32)


def _value(text: str, values: Words) -> np.ndarray:
    if text.startswith("{"):
        low, high = (_value(t.strip(), values) for t in text.strip("{}").split(","))
        return low | (high << np.uint32(16))
    return values[text] if text in values else np.array([int(text, 0)], dtype=np.uint32)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Bytes of b:a picked by the four nibbles of ``selector`` (no sign replication)."""
    whole = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    picks = [int(selector[0]) >> (4 * i) & 7 for i in range(4)]
    parts = [((whole >> np.uint64(8 * p)) & np.uint64(0xFF)) << np.uint64(8 * i) for i, p in enumerate(picks)]
    return np.bitwise_or.reduce(np.stack(np.broadcast_arrays(*parts))).astype(np.uint32)


def _halves_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Both BF16 halves multiplied, rounded to nearest."""
    halves = []
    for shift in (0, 16):
        x, y = (bf16(v >> np.uint32(shift)).double() for v in np.broadcast_arrays(a, b))
        bits = (x * y).to(torch.bfloat16).view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
        halves.append(bits << np.uint32(shift))
    return halves[0] | halves[1]


def bf16(bits: np.ndarray) -> torch.Tensor:
    """The low 16 bits of each word as BF16."""
    return torch.from_numpy((bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16)
