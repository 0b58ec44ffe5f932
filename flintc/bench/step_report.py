"""What ``flintc bench forward`` measures: one step in all and per kernel, beside its bytes and the read ceiling."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flintc.bench.built import step_of
from flintc.bench.ceiling import read_ceiling
from flintc.bench.forward import Event, ForwardBench
from flintc.codegen.cache import write_atomically
from flintc.ir.cost import decode_env, graph_cost, launch_cost
from flintc.ir.types import resolve
from flintc.runtime.cuda.step import Part


@dataclass(frozen=True, slots=True)
class PartTime:
    """One way to end a step: ``body`` (all layers and the final norm), ``logits``, ``tokens`` (sampled).

    nbytes: read and written, derived from the graph. share: of the read ceiling.
    """

    name: Part
    ms: float
    ms_p99: float
    nbytes: int
    share: float


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel over one step.

    us: microseconds of all its launches as the profiler saw them, waits included. alone_us: of one, in a chain of its
    own launches. mb: read and written by one, derived from the graph. share: those bytes in ``alone_us``, of the read
    ceiling. programs: of the first launch. resident: programs that a multiprocessor holds at once.
    redundancy: evaluations over those needed.
    """

    name: str
    launches: int
    us: float
    alone_us: float
    mb: float
    share: float
    programs: int
    resident: int
    redundancy: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything measured in one run. ceiling: bytes per second of a plain read."""

    spec: str
    weights: str
    context: int
    batch: int
    gpu: str
    ceiling: float
    launches: int
    workspace_bytes: int
    parts: tuple[PartTime, ...]
    kernels: tuple[KernelTime, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench forward --json`` prints."""
        return asdict(self)


def measure_step(
    spec: str, weights: str, bundle: Path | None, context: int, batch: int, repeats: int, trace: Path | None
) -> StepReport:
    """Run and time a step of ``batch`` sequences of ``context`` tokens; BackendError without a GPU.

    repeats: graph replays. trace: a file for a Chrome trace of one step.
    """
    built, bench = step_of(spec, weights, bundle, context, batch)
    ceiling = read_ceiling()
    graph, env = built.plan.graph, decode_env(built.plan.graph, context, batch)
    body, whole = (graph_cost(graph, env, launches).bytes for launches in (graph.body, graph.launches))
    parts = []
    for part, nbytes in (("body", body), ("logits", whole), ("tokens", whole)):
        if part == "tokens" and built.plan.sampler is None:
            continue
        timing = bench.time(repeats, part)  # type: ignore[arg-type]
        share = nbytes / (timing.median / 1e3) / ceiling
        parts.append(PartTime(part, timing.median, timing.percentile(99), nbytes, share))  # type: ignore[arg-type]
    # Before the profiler looks at this process: from then on there is more between any two launches.
    alone = {name: bench.time_chain(name) for name in dict.fromkeys(x.kernel for x in built.plan.launches)}
    events = bench.profile("logits")
    if trace is not None:
        write_atomically(trace, json.dumps(_chrome(events)).encode())
    return StepReport(
        graph.name, built.manifest.weights, context, batch, torch.cuda.get_device_name(), ceiling, len(events),
        bench.step.workspace_bytes, tuple(parts), _kernels(bench, events, alone, env, ceiling),
    )  # fmt: skip


def _kernels(
    bench: ForwardBench, events: Sequence[Event], alone: Mapping[str, float], env: dict[str, int], ceiling: float
) -> tuple[KernelTime, ...]:
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.us)
    graph = bench.plan.graph
    rows = []
    for planned, launch in zip(bench.plan.launches, graph.launches, strict=True):
        kernel = bench.plan.kernel_for(planned, bench.batch).name
        us = times.pop(kernel, None)
        if us is None:
            continue
        cost, chained = launch_cost(graph, launch, env), alone[planned.kernel]
        programs = math.prod(resolve(d, {**bench.symbols, "B": bench.batch}) for d in planned.grid)
        rows.append(KernelTime(
            planned.kernel, len(us), sum(us), chained, cost.bytes / 1e6, cost.bytes / (chained * 1e-6) / ceiling,
            programs, bench.step.kernels[kernel].resident(programs), cost.redundancy,
        ))  # fmt: skip
    return tuple(sorted(rows, key=lambda k: -k.launches * k.alone_us))


def _chrome(events: Sequence[Event]) -> dict[str, Any]:
    """The step as a Chrome trace; launches that overlap stand on two tracks."""
    return {
        "traceEvents": [
            {"name": e.name, "ph": "X", "ts": e.start, "dur": e.us, "pid": 0, "tid": i % 2}
            for i, e in enumerate(events)
        ]
    }
