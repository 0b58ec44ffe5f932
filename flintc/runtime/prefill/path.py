"""The general path: runs a chunk of a prompt through a plan's routines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flintc.ir.plan import Plan, Routine
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.kv import KvCache
from flintc.runtime.prefill.chunk import Chunk, make_chunk
from flintc.runtime.prefill.launch import Launch
from flintc.runtime.prefill.memory import LOGITS_ROWS
from flintc.runtime.prefill.products import full_sums
from flintc.runtime.prefill.routines import ROUTINES, Given, Values, dense
from flintc.runtime.prefill.steps import STEP_ROUTINES, StepRows

_AnyRows = TypeVar("_AnyRows", Chunk, StepRows)
_Function = Callable[[Given, Routine, _AnyRows, Values], None]

#: Rows of one chunk: the most that a prompt delays those who decode.
CHUNK = 8192


class GeneralPath:
    """Runs chunks of prompts from ``plan.general``.

    given: every weight, table and cache by value name (caches by their first versions), packed weights with a scale per
    row; all on one device. ``observe`` is told of each routine once it is enqueued, and of the activations there are.
    """

    def __init__(
        self,
        plan: Plan,
        launch: Launch,
        given: Mapping[str, Tensor | Nvfp4],
        kv: KvCache,
        chunk: int = CHUNK,
    ) -> None:
        assert plan.general is not None
        self.chunk = chunk
        self.observe: Callable[[Routine, Mapping[str, Tensor]], None] | None = None
        self._plan = plan
        self._kv = kv
        self._given = Given(plan, launch, given)
        self._device = next(t.device for t in given.values())
        *self._body, self._head = plan.general.routines
        self._reads = {r.name: {v for o in r.ops for v in plan.graph.ops[o].inputs} for r in plan.general.routines}
        #: How many routines read each value.
        self._readers = Counter(v for reads in self._reads.values() for v in reads)

    def chunks(self, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """Process ``ids`` as the next tokens of ``slot`` in chunks; yields what the head reads, bf16 [rows, hidden]."""
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            positions = self._kv.extend(slot, len(part), sliced=False)
            yield self.run(make_chunk(self._kv, slot, positions, part, self._device))

    @torch.no_grad()
    def run(self, chunk: Chunk) -> Tensor:
        """One chunk through all layers; its keys and values are in the cache afterwards."""
        values: dict[str, Tensor] = {}
        with full_sums():
            self._run(ROUTINES, chunk, values)
        return values[self._plan.graph.ops[self._head.ops[0]].inputs[0]]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Logits of the rows of ``hidden``, in pieces f32 [up to LOGITS_ROWS, vocab]."""
        head = dense(self._given, self._head)
        for first in range(0, len(hidden), LOGITS_ROWS):
            with full_sums():
                piece = head(hidden[first : first + LOGITS_ROWS])
            yield piece

    @torch.no_grad()
    def step(self, rows: StepRows) -> Tensor:
        """A wide step: the newest token of many sequences; logits f32 [rows, vocab].

        Asks nothing of the device, once a step has run before, so that it can be captured.
        """
        values: dict[str, Tensor] = {}
        (op,) = (self._plan.graph.ops[o] for o in self._head.ops)
        with full_sums():
            self._run(STEP_ROUTINES, rows, values)
            return dense(self._given, self._head)(values[op.inputs[0]])

    def _run(self, routines: Mapping[str, _Function[_AnyRows]], rows: _AnyRows, values: Values) -> None:
        left = self._readers.copy()
        for routine in self._body:
            routines[routine.kind](self._given, routine, rows, values)
            if self.observe is not None:
                self.observe(routine, values)
            for value in self._reads[routine.name]:
                left[value] -= 1
                if left[value] == 0:
                    values.pop(value, None)
