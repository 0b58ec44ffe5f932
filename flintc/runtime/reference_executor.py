"""The backend ``reference``: the op graph run by torch, where its weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flintc.ir.graph import Graph
from flintc.reference import Numerics, Nvfp4, run
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.storage import KvStorage

#: Rows of one step; rings are sized for as many.
ROWS = 128


class ReferenceExecutor:
    """Runs ``graph`` with ``weights`` and ``tables`` by value name.

    numerics: ``rounded`` rounds to BF16 where the ops say and caches BF16; ``fp32`` does neither.
    context, slots, pages: see :class:`KvCache`.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Tensor | Nvfp4],
        tables: Mapping[str, Tensor],
        numerics: Numerics,
        context: int,
        slots: int,
        pages: int | None = None,
    ) -> None:
        self.kv = KvCache(KvLayout.from_graph(graph).with_rows(ROWS), context, slots, pages)
        self.rows = ROWS
        self.path = "reference" if numerics == "rounded" else "reference-fp32"
        self._graph = graph
        self._body = _without_head(graph)
        self._given = {**weights, **tables}
        self._numerics: Numerics = numerics
        self._device = next(iter(weights.values())).device
        dtype = torch.bfloat16 if numerics == "rounded" else torch.float32
        self._storage = KvStorage(self.kv, dtype, self._device)

    def step(
        self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, logits_rows: Sequence[int]
    ) -> Tensor:
        """See :class:`~flintc.runtime.executor.Executor`.

        Each sequence runs by itself: torch chooses the order of a matrix product's sums by its shape, so that
        rows run together would change each other's last bits.
        """
        self._storage.grow()
        logits: dict[int, Tensor] = {}
        for slot in dict.fromkeys(seqs):
            rows = [row for row, seq in enumerate(seqs) if seq == slot]
            wanted = [row for row in rows if row in set(logits_rows)]
            made = self._run([ids[r] for r in rows], [positions[r] for r in rows], slot, bool(wanted))
            logits.update((row, made[rows.index(row)]) for row in wanted)
        return torch.stack([logits[row] for row in logits_rows]) if logits_rows else torch.empty(0)

    def _run(self, ids: Sequence[int], positions: Sequence[int], slot: int, with_head: bool) -> Tensor:
        rows = {"ids": ids, "positions": positions, "seqs": [slot] * len(ids)}
        inputs = {name: torch.tensor(values, dtype=torch.int32) for name, values in rows.items()}
        graph = self._graph if with_head else self._body
        changing = {name: tensor.to(self._device) for name, tensor in {**self.kv.tables, **inputs}.items()}
        given = {**self._given, **self._storage.tensors, **changing}
        return run(graph, given, self._numerics).get(self._graph.outputs[0], torch.empty(0)).cpu()


def _without_head(graph: Graph) -> Graph:
    """The graph that stops before the logits, for rows whose logits nobody reads."""
    ops = {name: op for name, op in graph.ops.items() if name not in graph.head}
    return replace(graph, ops=ops, outputs=graph.outputs[1:])
