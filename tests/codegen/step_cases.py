"""Steps of a whole small model: what it is given, and every value of it as the reference has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from graphs import baseline
from launches import TORCH
from torch import Tensor

from flintc.ir.graph import Op, Value
from flintc.ir.types import resolve
from flintc.reference import rope_table, run

SPEC = "tiny-flint"
SLOTS, PAGES_PER_SLOT, POSITIONS = 5, 8, 64


@dataclass(frozen=True)
class Step:
    """Run-time symbols, every value by name (caches at every version), and which rows are not padding."""

    env: Mapping[str, int]
    values: Mapping[str, Tensor]
    live: Tensor


@cache
def step(rows: Sequence[tuple[int, int]]) -> Step:
    """A step of (position, sequence) rows, on caches that hold what each sequence's past wrote and NaN elsewhere."""
    graph = baseline(SPEC)
    positions, seqs = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    env = {"B": len(rows), "Q": SLOTS, "T": PAGES_PER_SLOT, "P": SLOTS * PAGES_PER_SLOT, "C": POSITIONS}
    random = torch.Generator().manual_seed(len(rows))
    given = {"positions": positions, "seqs": seqs}
    for value in graph.values.values():
        if value.name not in given and value.name not in graph.producers:
            given[value.name] = _given(value, env, random)
    for op in graph.ops.values():
        if op.kind == "kv_write":
            _write_past(given, op, random)
    values = dict(given)

    def keep(op: Op, made: Mapping[str, Tensor]) -> None:
        values.update((name, tensor.clone()) for name, tensor in made.items())

    given = {name: t.clone() if graph.values[name].kind == "cache" else t for name, t in given.items()}
    run(graph, given, trace=keep)
    return Step(env, values, seqs >= 0)


def _given(value: Value, env: Mapping[str, int], random: torch.Generator) -> Tensor:
    shape = [resolve(d, env) for d in value.type.shape]
    if value.kind == "cache":
        return torch.full(shape, torch.nan, dtype=torch.bfloat16)
    if value.kind == "table":
        return rope_table(shape[0], 2 * shape[2], 10000.0)
    if value.name == "ids":
        return torch.randint(0, 512, shape, generator=random).int()
    if value.kind == "input":  # a block table: pages in no order
        return torch.randperm(shape[0] * shape[1], generator=random).view(shape).int()
    x = torch.randn(shape, generator=random)
    # Products of a weight with a row keep the row's size; vectors (norms, sinks) are near one.
    return (x * shape[-1] ** -0.5 if len(shape) > 1 else 1 + x / 4).to(TORCH[value.type.dtype])


def _write_past(given: Mapping[str, Tensor], write: Op, random: torch.Generator) -> None:
    """Random keys and values at the positions before each sequence's first row, where a window still sees them."""
    cache, table, window = given[write.inputs[2]], given[write.inputs[5]], write.attrs["window"]
    assert window is None or isinstance(window, int)
    page = cache.shape[3]
    for seq in set(given["seqs"].tolist()) - {-1}:
        now = int(given["positions"][given["seqs"] == seq].min())
        at = torch.arange(0 if window is None else max(0, now - window + 1), now)
        pages = table[seq, (at // page) % table.shape[1]].long()
        past = torch.randn(len(at), 2, cache.shape[2], cache.shape[4], generator=random)
        cache[pages, :, :, at % page] = past.bfloat16()
