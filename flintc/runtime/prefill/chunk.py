"""A chunk of a prompt, and where the keys that it attends to lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flintc.runtime.kv import KvCache


@dataclass(frozen=True, slots=True)
class Span:
    """The keys of a chunk on the layers of one block table, side by side from position ``base`` on.

    table: i32, the sequence's row of the block table. pages: i64, pages of the cache that hold the positions from
    ``base`` (a multiple of the page) to before the chunk.
    keys: room for all of them and the chunk's, in whole pages. oldest: first position of the chunk that the cache
    keeps: a later one would take the place of those before it.
    """

    base: int
    table: Tensor
    pages: Tensor
    keys: int
    oldest: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence from position ``start`` on: ids i32[rows]; spans by block table."""

    start: int
    ids: Tensor
    spans: Mapping[str, Span]

    @property
    def rows(self) -> int:
        """Tokens in the chunk."""
        return self.ids.shape[0]


def make_chunk(kv: KvCache, slot: int, positions: range, ids: Sequence[int], device: torch.device | str) -> Chunk:
    """The chunk of ``ids`` at ``positions``, for which ``kv`` has made room."""
    page = kv.layout.page
    tokens = torch.tensor(ids, dtype=torch.int32).to(device)
    spans = {}
    for name, table in kv.tables.items():
        window, ring = kv.layout.rings.get(name, (None, None))
        first = 0 if window is None else max(0, positions.start - window + 1)
        base = first // page * page
        columns = torch.arange(base // page, -(-positions.start // page)) % table.shape[1]
        held = -(-(positions.stop - base) // page) * page
        oldest = 0 if ring is None else positions.stop - ring * page
        own = table[slot]
        spans[name] = Span(base, own.to(device), own[columns].long().to(device), held, oldest)
    return Chunk(positions.start, tokens, spans)
