"""Bookkeeping of the paged KV cache: sequence slots, pages, rings. Knows positions and pages, never keys or values.

Layers that attend to the whole context share one block table: a page number stands for that page of each of them.
A windowed layer keeps a ring of pages per slot, in which position p takes page ``(p // page) % R``: a later position
overwrites the one R pages before it. Every refusal comes before anything is allocated or overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flintc.errors import CapacityError, VerificationError
from flintc.ir.graph import Graph, Op, Value


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One layer's cache [pages, 2, kv_heads, page, head_dim], named as its first version in the graph."""

    name: str
    table: str
    window: int | None
    page_shape: tuple[int, int, int, int]

    def page_bytes(self, item: int) -> int:
        """Bytes of one page with ``item`` bytes per number."""
        planes, heads, page, head_dim = self.page_shape
        return planes * heads * page * head_dim * item


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a graph's caches look like.

    page: positions per page, the same in all layers. table: name of the block table of the layers that attend to the
    whole context (None: there is no such layer). rings: name of each ring table -> (window, pages per slot).
    """

    page: int
    caches: tuple[CacheLayout, ...]
    table: str | None
    rings: Mapping[str, tuple[int, int]]

    @classmethod
    def from_graph(cls, graph: Graph) -> KvLayout:
        """Layout of the caches that the ops ``kv_write`` of ``graph`` update; VerificationError: pages differ."""
        writes = [op for op in graph.ops.values() if op.kind == "kv_write"]
        caches = tuple(_cache_layout(graph, op) for op in writes)
        pages = {cache.page_shape[2] for cache in caches}
        if len(pages) != 1:
            raise VerificationError(f"{graph.name}: caches with pages of {sorted(pages)} positions, expected one size")
        rings = {c.table: (c.window, _whole(graph.values[c.table], 1)) for c in caches if c.window is not None}
        table = next((c.table for c in caches if c.window is None), None)
        return cls(pages.pop(), caches, table, rings)

    def with_rows(self, rows: int) -> KvLayout:
        """The layout whose rings let a step write up to ``rows`` rows of one sequence."""
        rings = {name: (window, -(-(window - 1 + rows) // self.page)) for name, (window, _) in self.rings.items()}
        return replace(self, rings=rings)

    @property
    def rows(self) -> int | None:
        """Rows of one sequence that a step may write before the oldest of their windows is lost; None: any number."""
        return min((pages * self.page - window + 1 for window, pages in self.rings.values()), default=None)

    def page_bytes(self, item: int = 2) -> int:
        """Bytes that one page takes over all layers that attend to the whole context."""
        return sum(cache.page_bytes(item) for cache in self.caches if cache.window is None)

    def ring_bytes(self, item: int = 2) -> int:
        """Bytes that the rings of one slot take over all windowed layers."""
        return sum(self.rings[c.table][1] * c.page_bytes(item) for c in self.caches if c.window is not None)


def _cache_layout(graph: Graph, write: Op) -> CacheLayout:
    cache, table = write.inputs[2], write.inputs[5]
    window = write.attrs.get("window")
    assert window is None or isinstance(window, int)
    planes, heads, page, head_dim = (_whole(graph.values[cache], axis) for axis in range(1, 5))
    return CacheLayout(cache, table, window, (planes, heads, page, head_dim))


def _whole(value: Value, axis: int) -> int:
    size = value.type.shape[axis]
    assert isinstance(size, int), f"{value.name} is {value.type}: its axis {axis} must be a number"
    return size


@dataclass(slots=True)
class _Sequence:
    """limit: tokens promised. length: tokens held. written: end of the positions ever written since the slot was
    added, which a cut does not lower: what they overwrote in a ring stays lost."""

    limit: int
    length: int = 0
    written: int = 0
    pages: list[int] = field(default_factory=list)


class KvCache:
    """Slots and pages of the sequences a model holds.

    context: most tokens of one sequence. slots: most sequences at once. pages: pages of the pool that layers with a
    whole context share (default: enough for every slot to be full).
    """

    def __init__(self, layout: KvLayout, context: int, slots: int, pages: int | None = None) -> None:
        self.layout = layout
        self.context = context
        self.slots = slots
        columns = -(-context // layout.page)
        self.pages = slots * columns if pages is None else pages
        #: Block tables by name, i32 on the CPU: [slots, columns], and [slots, R] for a ring.
        self.tables: dict[str, Tensor] = {
            name: torch.arange(slots * ring, dtype=torch.int32).view(slots, ring)
            for name, (_, ring) in layout.rings.items()
        }
        if layout.table is not None:
            self.tables[layout.table] = torch.zeros(slots, columns, dtype=torch.int32)
        #: Counts changes of the tables, for whoever keeps a copy of them.
        self.changes = 0
        self._free_pages = list(reversed(range(self.pages)))
        self._free_slots = list(reversed(range(slots)))
        self._sequences: dict[int, _Sequence] = {}

    def nbytes(self, item: int = 2) -> dict[str, int]:
        """Bytes of the pool, of the rings and of the block tables, with ``item`` bytes per cached number."""
        return {
            "pool": self.pages * self.layout.page_bytes(item),
            "rings": self.slots * self.layout.ring_bytes(item),
            "tables": sum(table.nbytes for table in self.tables.values()),
        }

    def length(self, slot: int) -> int:
        """Tokens that ``slot`` holds; the next one takes this position."""
        return self._sequences[slot].length

    @property
    def highest_page(self) -> int:
        """Highest page number in use, -1 when none is."""
        return max((max(s.pages, default=-1) for s in self._sequences.values()), default=-1)

    def fits(self, limit: int) -> bool:
        """Whether a sequence of ``limit`` tokens can be added now."""
        return bool(self._free_slots) and self._promised() + self._pages_for(limit) <= self.pages

    def add(self, limit: int) -> int:
        """A slot for a new sequence of at most ``limit`` tokens, all of whose pages are promised to it.

        CapacityError: longer than the context, no slot is free, or the pool cannot promise so many pages.
        """
        if limit > self.context:
            raise CapacityError(
                f"{limit} tokens are asked for, prompt and output together; the context limit is {self.context}",
                remedy="shorten the prompt, lower max_tokens, or load the model with a larger context",
            )
        if not self._free_slots:
            raise CapacityError(f"all {self.slots} sequence slots are in use")
        free = self.pages - self._promised()
        if self._pages_for(limit) > free:
            raise CapacityError(
                f"{limit} tokens need {self._pages_for(limit)} KV pages of {self.layout.page} tokens; "
                f"{free} of {self.pages} are not promised to other sequences"
            )
        slot = self._free_slots.pop()
        self._sequences[slot] = _Sequence(limit)
        return slot

    def extend(self, slot: int, rows: int, *, sliced: bool = True) -> range:
        """Make room for the next ``rows`` tokens of ``slot`` and return the positions they take.

        sliced: all rows are written before any attends, so that a ring bounds their number; otherwise the caller
        attends first, and writes what the ring then keeps.
        CapacityError: beyond the sequence's limit, or more rows than a ring can take in one step.
        """
        sequence = self._sequences[slot]
        positions = range(sequence.length, sequence.length + rows)
        if positions.stop > sequence.limit:
            raise CapacityError(f"{positions.stop} tokens do not fit the {sequence.limit} that the sequence asked for")
        if sliced and self.layout.rows is not None and rows > self.layout.rows:
            raise CapacityError(f"{rows} rows of one sequence in a step; the window's ring takes {self.layout.rows}")
        self._append_pages(slot, sequence, self._pages_for(positions.stop) - len(sequence.pages))
        sequence.length = positions.stop
        sequence.written = max(sequence.written, positions.stop)
        return positions

    def holds(self, slot: int, length: int) -> bool:
        """Whether the first ``length`` tokens of ``slot`` can be continued: no ring has lost what their end needs.

        Position p is lost once p + R * page has been written.
        """
        sequence = self._sequences[slot]
        needed = ((max(0, length - window + 1), pages) for window, pages in self.layout.rings.values())
        kept = all(first + pages * self.layout.page >= sequence.written for first, pages in needed)
        return length == 0 or (length <= sequence.length and kept)

    def cut(self, slot: int, length: int) -> None:
        """Keep the first ``length`` tokens of ``slot`` and free the pages behind them.

        CapacityError: a ring no longer holds the tokens before the cut (see :meth:`holds`); cutting to 0 always works.
        """
        if not self.holds(slot, length):
            raise CapacityError(
                f"slot {slot} cannot be continued from token {length}: the sliding window before it is overwritten",
                remedy="recompute the prefix from its start",
            )
        sequence = self._sequences[slot]
        while len(sequence.pages) > self._pages_for(length):
            self._free_pages.append(sequence.pages.pop())
        sequence.length = length
        if length == 0:
            sequence.written = 0

    def finish(self, slot: int) -> None:
        """Give the slot and its pages back."""
        self.cut(slot, 0)
        del self._sequences[slot]
        self._free_slots.append(slot)

    def _append_pages(self, slot: int, sequence: _Sequence, count: int) -> None:
        if count <= 0:
            return
        assert self.layout.table is not None
        pages = [self._free_pages.pop() for _ in range(count)]
        first = len(sequence.pages)
        self.tables[self.layout.table][slot, first : first + count] = torch.tensor(pages, dtype=torch.int32)
        self.changes += 1
        sequence.pages += pages

    def _pages_for(self, tokens: int) -> int:
        return 0 if self.layout.table is None else -(-tokens // self.layout.page)

    def _promised(self) -> int:
        return sum(self._pages_for(s.limit) for s in self._sequences.values())
