"""Tensors behind a graph's caches and tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flintc.errors import SpecError
from flintc.ir.graph import Graph
from flintc.reference import rope_table
from flintc.runtime.kv import CacheLayout, KvCache
from flintc.spec import BoundModel

#: Pages the pool starts with.
_FIRST_PAGES = 8


class KvStorage:
    """The caches of a graph as tensors [pages, 2, kv_heads, page, head_dim], by the names of their first versions.

    The pool grows with the pages in use, up to what ``kv`` may hand out; ``whole`` allocates all of it at once, for
    memory whose address must stay. What was never written is NaN, so that reading it shows.
    """

    def __init__(
        self, kv: KvCache, dtype: torch.dtype, device: torch.device | str = "cpu", *, whole: bool = False
    ) -> None:
        self._kv = kv
        self._dtype = dtype
        self._device = device
        self.pages = kv.pages if whole else min(kv.pages, _FIRST_PAGES)
        self.tensors = {cache.name: self._empty(cache, self._pages_of(cache)) for cache in kv.layout.caches}

    @property
    def nbytes(self) -> int:
        """Bytes in memory now."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def grow(self) -> None:
        """Make room for the pages that ``kv`` has handed out."""
        needed = self._kv.highest_page + 1
        if needed <= self.pages:
            return
        before, self.pages = self.pages, min(self._kv.pages, max(needed, 2 * self.pages))
        for cache in self._kv.layout.caches:
            if cache.window is None:
                more = self._empty(cache, self.pages - before)
                self.tensors[cache.name] = torch.cat((self.tensors[cache.name], more))

    def _pages_of(self, cache: CacheLayout) -> int:
        if cache.window is None:
            return self.pages
        return self._kv.slots * self._kv.layout.rings[cache.table][1]

    def _empty(self, cache: CacheLayout, pages: int) -> Tensor:
        return torch.full((pages, *cache.page_shape), torch.nan, dtype=self._dtype, device=self._device)


def make_tables(
    graph: Graph, model: BoundModel, positions: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Values of kind ``table``: cosines and sines f32[positions, 2, head_dim/2] for the number ``rope_theta``."""
    tables: dict[str, Tensor] = {}
    for value in graph.values.values():
        if value.kind != "table":
            continue
        if "rope_theta" not in model.numbers:
            raise SpecError("the op rope needs a number rope_theta", model.spec.place("numbers"))
        half = value.type.shape[2]
        assert isinstance(half, int)
        tables[value.name] = rope_table(positions, 2 * half, model.numbers["rope_theta"], device)
    return tables


def rows_of_tables(tables: Mapping[str, Tensor]) -> int:
    """Positions that the tables cover: the symbol ``C`` (0 where the graph has no table)."""
    return max((table.shape[0] for table in tables.values()), default=0)
