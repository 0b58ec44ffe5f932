"""Requests decoded together on the GPU, timed by their tokens: weights synthesised, caches full of random keys."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flintc.bench.built import bundle_for, gpu_here, rope_base
from flintc.bench.synthetic import tensors
from flintc.bundle import Bundle
from flintc.errors import UsageError
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.batch import Decoding, Running
from flintc.runtime.cuda.executor import CudaExecutor
from flintc.runtime.generation import Request
from flintc.runtime.sampling import SamplingParams
from flintc.spec import bind_defaults, load_spec

#: Steps ahead of those that are timed: graphs are captured, and the host gets a step ahead.
UNTIMED = 4


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """``requests`` under way. served: those that a step gives a token each; wide: whether it is a wide step.

    ms: of one step, by the host's clock over all of them. tokens_per_second: of all requests together.
    """

    requests: int
    served: int
    wide: bool
    ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """Everything measured in one run. wide_from: requests from which on steps were wide."""

    spec: str
    weights: str
    context: int
    wide_from: int
    gpu: str
    times: tuple[DecodeTime, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench generate --json`` prints."""
        return asdict(self)


def measure_decode(
    spec: str,
    weights: str,
    bundle: Path | None,
    context: int,
    requests: Sequence[int],
    steps: int,
    wide_from: int | None = None,
) -> DecodeReport:
    """Time decoding for each number of ``requests``, whose sequences hold about ``context`` tokens each.

    wide_from: in place of the runtime's own. BackendError without a GPU; UsageError where the context has no room for
    the steps; CapacityError where the GPU's memory does not do.
    """
    target = gpu_here()
    if context <= steps + UNTIMED + 1:
        raise UsageError(f"--context is {context}: {steps} steps need more than that")
    model = bind_defaults(load_spec(spec))
    built = bundle_for(model, weights, bundle, target)
    executor = synthetic_executor(built, target, context, max(requests), rope_base(model), wide_from)
    times = tuple(_measure(executor, count, steps) for count in requests)
    return DecodeReport(spec, weights, context, executor.wide_from, torch.cuda.get_device_name(), times)


def synthetic_executor(
    bundle: Bundle, target: str, context: int, slots: int, theta: float, wide_from: int | None = None
) -> CudaExecutor:
    """An executor with random weights, and random keys in all of its cache."""
    graph = bundle.plan.graph
    sizes = {"B": 1, "Q": 1, "T": 1, "P": 1, "C": context}
    made = tensors(graph, sizes, theta, "cuda", 0)
    weights = {n: t for n, t in made.items() if graph.values[n].kind == "weight"}
    tables = {n: t for n, t in made.items() if graph.values[n].kind == "table" and not isinstance(t, Nvfp4)}
    del made
    executor = CudaExecutor(
        bundle.plan, bundle.for_target(target), weights, tables, context, slots, bundle.manifest.batches,
        wide_from=wide_from,
    )  # fmt: skip
    for cache in executor.caches.values():
        cache.normal_()
    return executor


def _measure(executor: CudaExecutor, count: int, steps: int) -> DecodeTime:
    with _running(executor, count, UNTIMED + steps + 1) as running:
        decoding = Decoding(executor, None)
        for _ in range(UNTIMED):
            list(decoding.advance(running))
        torch.cuda.synchronize()
        start = time.perf_counter()
        tokens = sum(len(list(decoding.advance(running))) for _ in range(steps))
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
    served = tokens // steps
    return DecodeTime(count, served, served > executor.rows, seconds * 1e3 / steps, tokens / seconds)


@contextmanager
def _running(executor: CudaExecutor, count: int, room: int) -> Iterator[list[Running]]:
    """Requests whose sequences are full but for ``room`` tokens."""
    vocab = executor.vocab
    ids = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    running = []
    try:
        for number, token in enumerate(ids):
            params = SamplingParams(temperature=1.0, top_p=0.95, top_k=20, seed=number)
            request = Request((0,), params, 1 << 30, frozenset())
            slot = executor.kv.add(executor.kv.context)
            running.append(Running(number, request, slot, token, 1))
            executor.kv.extend(slot, executor.kv.context - room, sliced=False)
        yield running
    finally:
        for one in running:
            executor.kv.finish(one.slot)
