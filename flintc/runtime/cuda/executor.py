"""The backend ``cuda``: a bundle's kernels on one GPU, one CUDA graph per batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flintc.ir.plan import CompiledKernel, Plan
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.cuda.step import DeviceStep
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.storage import KvStorage, rows_of_tables
from flintc.runtime.values import attention_chunk

_ROW_INPUTS = ("ids", "positions", "seqs")


class CudaExecutor:
    """Runs ``plan`` from its compiled kernels, with ``weights`` and ``tables`` on the GPU by value name.

    batches: row counts that get a CUDA graph, captured on first use; other counts are padded up with rows that have
    no sequence. context, slots, pages: see :class:`KvCache`; the whole cache is allocated here, since a captured
    graph holds its address.
    """

    path = "cuda"

    def __init__(
        self,
        plan: Plan,
        compiled: Mapping[str, CompiledKernel],
        weights: Mapping[str, Tensor | Nvfp4],
        tables: Mapping[str, Tensor],
        context: int,
        slots: int,
        batches: Sequence[int] = (1, 2, 4, 8),
        pages: int | None = None,
    ) -> None:
        self.kv = KvCache(KvLayout.from_graph(plan.graph), context, slots, pages)
        self.rows = max(batches)
        device = next(iter(weights.values())).device
        self._storage = KvStorage(self.kv, torch.bfloat16, device, whole=True)
        self._block_tables = {name: table.to(device) for name, table in self.kv.tables.items()}
        self._rows = torch.zeros((len(_ROW_INPUTS), self.rows), dtype=torch.int32, device=device)
        self._staged = torch.zeros_like(self._rows, device="cpu").pin_memory()
        rows = dict(zip(_ROW_INPUTS, self._rows, strict=True))
        given = {**weights, **tables, **self._storage.tensors, **self._block_tables, **rows}
        self._step = DeviceStep(plan, compiled, given, self._symbols(plan, tables), batches)
        self._logits = plan.graph.outputs[0]

    def _symbols(self, plan: Plan, tables: Mapping[str, Tensor]) -> dict[str, int]:
        columns = -(-self.kv.context // self.kv.layout.page)
        return {
            "Q": self.kv.slots,
            "T": columns,
            "P": self.kv.pages,
            "C": rows_of_tables(tables),
            "S": -(-self.kv.context // attention_chunk(plan.graph)),
        }

    def step(
        self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, logits_rows: Sequence[int]
    ) -> Tensor:
        """See :class:`~flintc.runtime.executor.Executor`; at most ``rows`` rows."""
        batch = next(b for b in self._step.batches if b >= len(ids))
        self._write_inputs(ids, positions, seqs, batch)
        self._step.replay(batch)
        if not logits_rows:
            return torch.empty(0)
        return self._step.value(self._logits, batch)[list(logits_rows)].cpu()

    def _write_inputs(self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], batch: int) -> None:
        """Copy a step's inputs to the device; rows past the live ones belong to no sequence."""
        # The previous step may still be reading what is staged here.
        torch.cuda.current_stream(self._rows.device).synchronize()
        self._staged[:, : len(ids)] = torch.tensor([list(ids), list(positions), list(seqs)], dtype=torch.int32)
        self._staged[:2, len(ids) : batch] = 0
        self._staged[2, len(ids) : batch] = -1
        self._rows.copy_(self._staged, non_blocking=True)
        for name, table in self.kv.tables.items():
            self._block_tables[name].copy_(table)
