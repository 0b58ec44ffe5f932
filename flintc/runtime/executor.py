"""What runs a forward step, and how prompts are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flintc.runtime.kv import KvCache


class Executor(Protocol):
    """Runs steps of rows; owns the weights and the cached keys and values that ``kv`` keeps the books of.

    kv: positions must be made room for there (``extend``) before the step that writes them.
    rows: most rows of one step. path: what a report calls this way of running.
    """

    kv: KvCache
    rows: int
    path: str

    def step(
        self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, logits_rows: Sequence[int]
    ) -> Tensor:
        """Run one step and return the logits of the rows ``logits_rows``: f32[len(logits_rows), vocab] on the CPU.

        ids, positions, seqs: token, position and sequence slot of each row. A row's logits do not depend on the rows
        of other sequences, not even in their last bit.
        """
        ...


def slices(executor: Executor, slot: int, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], range]]:
    """Cut the next tokens of ``slot`` into steps the backend and the rings allow; yields (ids, positions).

    Room for a slice is made when it is yielded. The cuts depend on the number of tokens alone.
    """
    size = min(executor.rows, executor.kv.layout.rows or executor.rows)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        yield part, executor.kv.extend(slot, len(part))


def prefill(executor: Executor, slot: int, ids: Sequence[int]) -> Tensor:
    """Process the next tokens of ``slot`` and return the logits of the last: f32[1, vocab]."""
    last = executor.kv.length(slot) + len(ids) - 1
    logits = torch.empty(0)
    for part, positions in slices(executor, slot, ids):
        rows = [len(part) - 1] if positions[-1] == last else []
        logits = executor.step(part, positions, [slot] * len(part), logits_rows=rows)
    return logits


def forward(executor: Executor, slot: int, ids: Sequence[int]) -> Tensor:
    """Process the next tokens of ``slot`` and return the logits of each: f32[len(ids), vocab]."""
    pieces = [
        executor.step(part, positions, [slot] * len(part), logits_rows=range(len(part)))
        for part, positions in slices(executor, slot, ids)
    ]
    return torch.cat(pieces)
