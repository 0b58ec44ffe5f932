"""Rows, paged caches and graphs for tests of the kernels around the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from launches import Maker
from torch import Tensor

from flintc.codegen.families.attention import SEGMENT, STRIP
from flintc.ir.graph import Dependent, Graph
from flintc.ir.ops import splits


@dataclass(frozen=True)
class Sizes:
    """One attention layer. ``window`` None: the whole context, in at most so many ``partials`` a row."""

    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    page: int = 8
    chunk: int = 16
    window: int | None = None
    sinks: bool = True
    partials: int = SEGMENT + 4

    @property
    def scale(self) -> float:
        return self.head**-0.5

    @property
    def one_tile(self) -> bool:
        """Whether one step of one warp takes every chunk, so that its maximum is the chunk's.

        Where it takes several chunks to a run, its maximum is none of the reference's: see :attr:`Rows.exact`.
        """
        return self.chunk <= STRIP and self.chunk & (self.chunk - 1) == 0

    @property
    def ring(self) -> int:
        """Pages of a windowed sequence: the window before a row, and eight rows of its own step."""
        assert self.window is not None
        return -(-(self.window - 1 + 8) // self.page)

    def graph(self, kind: str) -> Graph:
        """``attention_partial``, ``attention_merge``, ``attention`` (one launch), or ``unfused`` (two launches)."""
        m, inputs = Maker(), ("positions", "seqs")
        for name in inputs:
            m.given(name, "i32", "B")
        partials: Sequence[str] = ("o", "m", "l")
        sinks = (m.given("sinks", "f32", self.heads, kind="weight"),) if self.sinks else ()
        if kind == "attention_merge":
            count = splits(**self.cut)
            m.given("o", "f32", "B", self.heads, count, self.head)
            m.given("m", "f32", "B", self.heads, count)
            m.given("l", "f32", "B", self.heads, count)
        else:
            m.given("q", "bf16", "B", self.heads, self.head)
            m.given("cache", "bf16", "P", 2, self.kv_heads, self.page, self.head, kind="cache")
            m.given("table", "i32", "Q", "T" if self.window is None else self.ring)
            reads = ("q", "cache", *inputs, "table")
            m.op("attention_partial", reads, partials, scale=self.scale, **self.cut)
        if kind == "attention_partial":
            return m.graph(*partials)
        m.op("attention_merge", (*partials, *inputs, *sinks), ("y",), **self.cut)
        return m.graph("y", role="attention" if kind == "attention" else None)

    def dependent(self, kind: str) -> Graph:
        """The same, every launch a dependent one with everything ahead of its wait that may be."""
        graph = self.graph(kind)
        chained = [
            replace(x, dependent=Dependent(tuple(v for v in ("cache", "sinks") if v in graph.reads(x))))
            for x in graph.launches
        ]
        return graph.with_launches(tuple(chained))

    @property
    def cut(self) -> dict[str, Any]:
        """What a partial covers: attributes of attention's partials and of their merge."""
        partials = self.partials if self.window is None else None
        return {"window": self.window, "chunk": self.chunk, "partials": partials}


@dataclass(frozen=True)
class Rows:
    """Inputs of a step. Every slot of the cache that no row may read is NaN."""

    sizes: Sizes
    q: Tensor
    cache: Tensor
    positions: Tensor
    seqs: Tensor
    table: Tensor
    sinks: Tensor

    @property
    def given(self) -> dict[str, Tensor]:
        """By the names of the graphs."""
        return {
            "q": self.q,
            "cache": self.cache,
            "positions": self.positions,
            "seqs": self.seqs,
            "table": self.table,
            "sinks": self.sinks,
        }

    @property
    def env(self) -> dict[str, int]:
        """Run-time symbols of the step."""
        return {
            "B": len(self.positions),
            "P": self.cache.shape[0],
            "Q": self.table.shape[0],
            "T": self.table.shape[1],
        }

    @property
    def exact(self) -> bool:
        """Whether the kernels round no probability relative to another maximum than the reference's."""
        chunks = int(self.positions.max()) // self.sizes.chunk + 1
        return self.sizes.one_tile and (self.sizes.window is not None or chunks <= self.sizes.partials)

    def only(self, row: int) -> Rows:
        """The step of one row alone."""
        part = slice(row, row + 1)
        return replace(self, q=self.q[part], positions=self.positions[part], seqs=self.seqs[part])


def rows(sizes: Sizes, positions: Sequence[int], seqs: Sequence[int], seed: int = 0) -> Rows:
    """Random queries, sinks, and a cache that holds what the rows may read, its pages in no order."""
    random = torch.Generator().manual_seed(seed)
    slots = max(seqs) + 1 if max(seqs) >= 0 else 1
    columns = sizes.ring if sizes.window is not None else max(positions) // sizes.page + 2
    pages = slots * columns + 3
    table = torch.randperm(pages, generator=random)[: slots * columns].view(slots, columns).int()
    shape = (pages, 2, sizes.kv_heads, sizes.page, sizes.head)
    cache = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    for seq in range(slots):
        mine = [p for p, s in zip(positions, seqs, strict=True) if s == seq]
        if not mine:
            continue
        oldest = 0 if sizes.window is None else max(0, min(mine) - sizes.window + 1)
        at = torch.arange(oldest, max(mine) + 1)
        page = table[seq, (at // sizes.page) % columns].long()
        entries = torch.randn(len(at), 2, sizes.kv_heads, sizes.head, generator=random)
        cache[page, :, :, at % sizes.page] = entries.bfloat16()
    q = torch.randn(len(positions), sizes.heads, sizes.head, generator=random) * 3
    sinks = torch.randn(sizes.heads, generator=random) * 2
    index = torch.tensor(positions, dtype=torch.int32), torch.tensor(seqs, dtype=torch.int32)
    return Rows(sizes, q.bfloat16(), cache, *index, table, sinks)
