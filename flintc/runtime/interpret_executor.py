"""The backend ``interpret``: a plan's generated kernels in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flintc.codegen.interpret import load_interpreted
from flintc.ir.plan import Arg, Plan
from flintc.ir.types import resolve
from flintc.reference import Nvfp4
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.storage import KvStorage, rows_of_tables
from flintc.runtime.values import TORCH_DTYPES, for_kernels, zeroed

#: Rows of a step as kernels are captured for them; others are padded up.
BATCHES = (1, 2, 4, 8)

#: As BF16, FP32 or either half of an FP32 this is NaN; as an index it is -1.
_POISON = 0xFF


class InterpretExecutor:
    """Runs ``plan`` with ``weights`` and ``tables`` by value name.

    An activation is NaN until a launch writes it, so that a value nothing wrote shows in the logits.
    context, slots, pages: see :class:`KvCache`.
    """

    path = "interpret"
    rows = BATCHES[-1]

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Tensor | Nvfp4],
        tables: Mapping[str, Tensor],
        context: int,
        slots: int,
        pages: int | None = None,
    ) -> None:
        self.kv = KvCache(KvLayout.from_graph(plan.graph), context, slots, pages)
        #: Kernel calls made so far; a step makes one per launch of the plan.
        self.calls = 0
        self._plan = plan
        self._kernels: dict[str, Callable[[tuple[int, int, int], Sequence[Any]], None]] = {
            name: load_interpreted(kernel) for name, kernel in plan.kernels.items()
        }
        self._given = for_kernels({**weights, **tables})
        self._storage = KvStorage(self.kv, torch.bfloat16)
        self._stored = plan.graph.first_versions
        self._symbols = {"Q": slots, "T": -(-context // self.kv.layout.page), "C": rows_of_tables(tables)}
        self._scratch = zeroed(plan.scratch, self._env(self.rows))

    def step(
        self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, logits_rows: Sequence[int]
    ) -> Tensor:
        """See :class:`~flintc.runtime.executor.Executor`; at most ``rows`` rows."""
        self._storage.grow()
        batch = next(b for b in BATCHES if b >= len(ids))
        padding = [0] * (batch - len(ids))
        rows = {"ids": [*ids, *padding], "positions": [*positions, *padding], "seqs": [*seqs, *(-1 for _ in padding)]}
        inputs = {name: torch.tensor(values, dtype=torch.int32) for name, values in rows.items()}
        env = self._env(batch)
        step = _Step(self._plan, env, {**self._given, **self._storage.tensors, **self.kv.tables, **inputs})
        for launch in self._plan.launches:
            x, y, z = (resolve(d, env) for d in launch.grid)
            kernel = self._kernels[self._plan.kernel_for(launch, batch).name]
            kernel((x, y, z), [self._argument(step, arg) for arg in launch.args])
            self.calls += 1
        return step.activation(self._plan.graph.outputs[0])[list(logits_rows)]

    def _env(self, batch: int) -> dict[str, int]:
        """Run-time symbols of a step of ``batch`` rows."""
        return {**self._symbols, "B": batch, "P": self._storage.pages}

    def _argument(self, step: _Step, arg: Arg) -> Tensor | int:
        if arg.kind == "symbol":
            return step.env[arg.ref]
        if arg.kind == "scratch":
            return self._scratch[arg.ref]
        name, _, part = arg.ref.partition("#")
        if name in self._plan.placement:
            return step.passed(name)
        given = step.given[self._stored.get(name, name)]
        tensor = getattr(given, part) if arg.kind == "part" else given
        assert isinstance(tensor, Tensor)
        return tensor


class _Step:
    """Buffers of one step, and the tensors given to it by value name."""

    def __init__(self, plan: Plan, env: Mapping[str, int], given: Mapping[str, Tensor | Nvfp4]) -> None:
        self.env = env
        self.given = given
        self._plan = plan
        self._seen: set[str] = set()
        self._buffers = {
            name: torch.empty(max(t.nbytes(env) for t in buffer.types), dtype=torch.uint8)
            for name, buffer in plan.buffers.items()
        }

    def passed(self, name: str) -> Tensor:
        """An activation for a launch; poisoned where this is the first launch that it is passed to, its maker."""
        tensor = self.activation(name)
        if name not in self._seen:
            self._seen.add(name)
            tensor.view(torch.uint8).fill_(_POISON)
        return tensor

    def activation(self, name: str) -> Tensor:
        """An activation as its buffer holds it."""
        type = self._plan.graph.values[name].type
        data = self._buffers[self._plan.placement[name]][: type.nbytes(self.env)]
        return data.view(TORCH_DTYPES[type.dtype]).view([resolve(d, self.env) for d in type.shape])
