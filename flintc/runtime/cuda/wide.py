"""Wide steps on the GPU: up to 64 rows, each the newest token of a sequence of its own, captured as CUDA graphs.

They run on the kernels of prompts, one after the other, and share nothing with the steps of the fast path but
weights and caches: a model that is not asked for as many sequences as make them worth it makes none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flintc.errors import BackendError
from flintc.ir.graph import Graph
from flintc.ir.plan import Arg, Plan
from flintc.ir.types import resolve
from flintc.runtime.cuda.step import Part
from flintc.runtime.prefill.launch import Launch, names_of
from flintc.runtime.prefill.memory import chunk_bytes
from flintc.runtime.prefill.path import GeneralPath
from flintc.runtime.prefill.steps import StepRows, counters_of, serves_steps, step_bytes
from flintc.runtime.values import zeroed

#: Rows of the captured steps; fewer are padded up with rows of no sequence.
WIDTHS = (16, 32, 64)
#: Requests under way from which on a wide step makes more tokens a second than a full step of the fast path, by the
#: format of the weights: measured at 4,096 tokens on an H200 (docs/benchmarks.md).
WIDE_FROM: Mapping[str, int] = {"bf16": 32, "nvfp4": 48}


def default_wide_from(graph: Graph) -> int:
    """See :data:`WIDE_FROM`, of the weights of ``graph``."""
    packed = any(v.kind == "weight" and v.type.dtype == "nvfp4" for v in graph.values.values())
    return WIDE_FROM["nvfp4" if packed else "bf16"]


def serves_wide(plan: Plan) -> bool:
    """Whether ``plan`` has what wide steps need."""
    return plan.general is not None and plan.sampler is not None and serves_steps(plan.general)


def wide_bytes(plan: Plan) -> int:
    """Most bytes that the widest step takes, beside weights and caches; graphs of other widths share its memory."""
    assert plan.general is not None and plan.sampler is not None
    rows = WIDTHS[-1]
    page = next(v.type.shape[3] for v in plan.graph.values.values() if v.kind == "cache")
    sampler = sum(s.type.nbytes({"B": rows}) for s in plan.sampler.memory.values())
    logits = plan.graph.values[plan.graph.outputs[0]].type
    # The logits of every width and part stay where a graph has put them.
    kept = 2 * sum(logits.nbytes({"B": width}) for width in WIDTHS)
    assert isinstance(page, int)
    return chunk_bytes(plan.graph, plan.general, rows, page) + step_bytes(plan.general, rows) + sampler + kept


class WideStep:
    """Steps of ``WIDTHS`` rows of many sequences, each captured when it is first needed.

    path: the general path of ``plan``, whose weights and caches these steps share. launch: calls the sampler's kernels.
    tables: block tables by name, on the device. The caller writes ``inputs`` between steps, rows past the live ones
    with the sequence -1. Offers what a Chooser asks of a step.
    """

    def __init__(
        self,
        plan: Plan,
        path: GeneralPath,
        launch: Launch,
        tables: Mapping[str, Tensor],
    ) -> None:
        assert plan.general is not None and plan.sampler is not None
        self.plan = plan
        self.batches = WIDTHS
        self.device = next(iter(tables.values())).device
        rows = WIDTHS[-1]
        #: ids, positions and sequence slots of the rows, i32[3, 64].
        self.inputs = torch.zeros((3, rows), dtype=torch.int32, device=self.device)
        self.inputs[2] = -1
        self.tensors = dict(zip(("ids", "positions", "seqs"), self.inputs, strict=True))
        #: Memory of the sampler, by name.
        self.sampler = zeroed(plan.sampler.memory, {"B": rows}, self.device)
        self._path = path
        self._tables = tables
        self._counters = torch.zeros(counters_of(plan.general, rows), dtype=torch.int32, device=self.device)
        self._launch = launch
        self._graphs: dict[tuple[int, Part], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._last: Part = "logits"

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """What captures run on."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @cached_property
    def _pool(self) -> Any:
        """Memory of the graphs, which share it: no two of them ever run at the same time."""
        return torch.cuda.graph_pool_handle()

    def replay(self, rows: int, part: Part = "logits") -> None:
        """Run one captured step of ``rows`` rows on the current stream; ``tokens``: and choose the next ones."""
        self._last = part
        self._captured(rows, part)[0].replay()

    def value(self, name: str, rows: int) -> Tensor:
        """The logits of the last step, which had ``rows`` rows: f32[rows, vocab]."""
        if name != self.plan.graph.outputs[0]:
            raise BackendError(f"a wide step keeps its logits, not {name}")
        return self._captured(rows, self._last)[1]

    def _captured(self, rows: int, part: Part) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if (rows, part) not in self._graphs:
            self._graphs[rows, part] = self._capture(rows, part)
        return self._graphs[rows, part]

    def _capture(self, rows: int, part: Part) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        current = torch.cuda.current_stream(self.device)
        given = self.inputs.clone()
        self.inputs[2] = -1
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Of no sequence, so that it does nothing: what is made once, kernels, scales and workspaces, is made here.
            self._run(rows, part)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = self._run(rows, part)
        self.inputs.copy_(given)
        return graph, logits

    def _run(self, rows: int, part: Part) -> Tensor:
        """Enqueue one step on the current stream."""
        ids, positions, seqs = (self.inputs[i, :rows] for i in range(3))
        logits = self._path.step(StepRows(ids, positions, seqs, self._tables, self._counters))
        if part == "tokens":
            self._sample(rows, logits)
        return logits

    def _sample(self, rows: int, logits: Tensor) -> None:
        """The plan's sampler on the rows of ``logits``."""
        assert self.plan.sampler is not None
        for launch in self.plan.sampler.launches:
            kernel = self.plan.kernels[launch.kernel]
            x, y, z = (resolve(d, {"B": rows}) for d in launch.grid)
            given = dict(zip(names_of(kernel), (self._argument(arg, logits) for arg in launch.args), strict=True))
            self._launch(kernel, (x, y, z), **given)

    def _argument(self, arg: Arg, logits: Tensor) -> Tensor:
        if arg.kind == "scratch":
            return self.sampler[arg.ref]
        return logits if arg.ref == self.plan.graph.outputs[0] else self.tensors[arg.ref]
