"""Prompts of a whole model on the GPU, timed: weights synthesised, random tokens, the general path chunk by chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flintc.bench.built import bundle_for, gpu_here, rope_base
from flintc.bench.synthetic import tensors
from flintc.bench.timing import median_ms
from flintc.errors import UsageError
from flintc.ir.graph import Graph
from flintc.ir.plan import CompiledKernel, Plan, Routine
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.prefill.launch import CudaLaunch
from flintc.runtime.prefill.path import CHUNK, GeneralPath
from flintc.runtime.storage import KvStorage
from flintc.runtime.values import for_kernels
from flintc.spec import bind_defaults, load_spec

#: Side of the square product whose rate is called the tensor peak.
PEAK_SIDE = 8192


@dataclass(frozen=True, slots=True)
class PromptTime:
    """A prompt of ``tokens``: median milliseconds, floating-point operations, share of the tensor peak.

    kinds: milliseconds by kind of routine, from events around each of them in one run. peak_bytes: the most that was
    allocated during the prompt, beyond what it found there. loads: rows that an expert got in the first chunk, over
    all layers: least, quarter, half, three quarters, most.
    """

    tokens: int
    ms: float
    flops: float
    share: float
    kinds: Mapping[str, float]
    peak_bytes: int
    loads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Everything measured in one run. peak: operations a second of a square BF16 product."""

    spec: str
    weights: str
    chunk: int
    gpu: str
    peak: float
    prompts: tuple[PromptTime, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench prefill --json`` prints."""
        return asdict(self)


def measure_prefill(
    spec: str, weights: str, bundle: Path | None, tokens: Sequence[int], chunk: int | None, repeats: int
) -> PrefillReport:
    """Time prompts of each length in ``tokens``; BackendError without a GPU."""
    target = gpu_here()
    model = bind_defaults(load_spec(spec))
    built = bundle_for(model, weights, bundle, target)
    bench = PrefillBench(built.plan, built.for_target(target), max(tokens), chunk or CHUNK, rope_base(model))
    peak = tensor_peak()
    for _ in range(2):
        bench.prompt(min(tokens))  # what is made once is made now
    prompts = tuple(bench.measure(count, repeats, peak) for count in tokens)
    return PrefillReport(spec, weights, bench.path.chunk, torch.cuda.get_device_name(), peak, prompts)


def tensor_peak() -> float:
    """Operations a second of a square BF16 product through torch."""
    a, b = (torch.randn(PEAK_SIDE, PEAK_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * PEAK_SIDE**3 / median_ms(lambda: torch.mm(a, b), repeats=10) * 1e3


class PrefillBench:
    """The general path of ``plan`` with synthetic weights and room for one prompt of ``context`` tokens.

    UsageError where the plan has none.
    """

    def __init__(
        self,
        plan: Plan,
        compiled: Mapping[str, CompiledKernel],
        context: int,
        chunk: int,
        theta: float,
        seed: int = 0,
    ) -> None:
        self.graph, general = plan.graph, plan.general
        if general is None:
            raise UsageError(f"the plan of {self.graph.name} has no general path: nothing to time")
        self.kv = KvCache(KvLayout.from_graph(self.graph), context, 1)
        sizes = {"B": 1, "Q": 1, "T": 1, "P": 1, "C": context}
        #: Weights and tables by value name.
        self.given = for_kernels(tensors(self.graph, sizes, theta, "cuda", seed))
        storage = KvStorage(self.kv, torch.bfloat16, "cuda", whole=True)
        launch = CudaLaunch(general.kernels, compiled)
        self.path = GeneralPath(plan, launch, {**self.given, **storage.tensors}, self.kv, chunk)
        embed = next(op for op in self.graph.ops.values() if op.kind == "embed")
        self._vocab = self.graph.values[embed.inputs[1]].type.shape[0]
        self._seed = seed

    def prompt(self, count: int, repeat: int = 0) -> Tensor:
        """What the head reads after a prompt of ``count`` random tokens; ``repeat`` chooses them."""
        assert isinstance(self._vocab, int)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + repeat)
        ids = torch.randint(0, self._vocab, (count,), generator=generator).tolist()
        slot = self.kv.add(count)
        try:
            return list(self.path.chunks(slot, ids))[-1]
        finally:
            self.kv.finish(slot)

    def measure(self, count: int, repeats: int, peak: float) -> PromptTime:
        """Time prompts of ``count`` tokens; the first, observed, does not count."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kinds, loads = self._observed(count)
        used = torch.cuda.max_memory_allocated() - before
        taken = sorted(self._timed(count, repeat + 1) for repeat in range(repeats))
        ms = taken[len(taken) // 2]
        flops = prompt_flops(self.graph, count)
        return PromptTime(count, ms, flops, flops / ms * 1e3 / peak, kinds, used, loads)

    def _timed(self, count: int, repeat: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        self.prompt(count, repeat)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _observed(self, count: int) -> tuple[Mapping[str, float], tuple[int, ...]]:
        """Milliseconds by kind of routine, and how rows spread over experts in the first chunk."""
        marks: list[tuple[str, Any]] = []
        loads: list[Tensor] = []
        layers = sum(op.kind == "topk" for op in self.graph.ops.values())

        def mark(kind: str) -> None:
            marks.append((kind, torch.cuda.Event(enable_timing=True)))  # type: ignore[no-untyped-call]
            marks[-1][1].record()

        def observe(routine: Routine, values: Mapping[str, Tensor]) -> None:
            mark(routine.kind)
            if routine.kind == "experts" and len(loads) < layers:
                topk, weight = self.graph.ops[routine.ops[1]], self.graph.ops[routine.ops[2]].inputs[2]
                experts = self.graph.values[weight].type.shape[0]
                assert isinstance(experts, int)
                loads.append(values[topk.outputs[0]].flatten().bincount(minlength=experts))
                mark("histogram")

        self.path.observe = observe
        torch.cuda.synchronize()
        mark("start")
        self.prompt(count)
        self.path.observe = None
        torch.cuda.synchronize()
        kinds: defaultdict[str, float] = defaultdict(float)
        for (_, earlier), (kind, event) in pairwise(marks):
            kinds[kind] += earlier.elapsed_time(event)
        kinds.pop("histogram", None)
        spread = torch.cat(loads).sort().values if loads else torch.zeros(1, dtype=torch.int64)
        quarters = (spread[(len(spread) - 1) * q // 4] for q in range(5))
        return dict(kinds), tuple(int(q) for q in quarters)


def prompt_flops(graph: Graph, tokens: int) -> float:
    """Operations that a prompt asks for: products with the weights its tokens use, and attention to what they see."""
    return float(sum(_flops(graph, tokens)))


def _flops(graph: Graph, tokens: int) -> Iterator[int]:
    shape = {name: [d for d in v.type.shape if isinstance(d, int)] for name, v in graph.values.items()}
    for op in graph.ops.values():
        if op.name in graph.head:
            continue
        if op.kind in ("linear", "router"):
            rows, columns = shape[op.inputs[1]]
            yield 2 * tokens * rows * columns
        elif op.kind == "expert_linear":
            _, rows, columns = shape[op.inputs[2]]
            yield 2 * tokens * shape[op.outputs[0]][0] * rows * columns
        elif op.kind == "attention_partial":
            heads, head = shape[op.inputs[0]]
            window = op.attrs["window"]
            most = tokens if window is None else min(tokens, int(str(window)))
            seen = most * (most + 1) // 2 + (tokens - most) * most
            yield 4 * heads * head * seen
