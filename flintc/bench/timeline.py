"""``flintc bench timeline``: what each launch of a step waits for and works at, by stamps of its own programs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flintc.bench.built import gpu_here, step_of
from flintc.bench.forward import ForwardBench
from flintc.bench.stamps import COLUMNS, END, PLACE, START, WAITED, stamped, stamps_of
from flintc.codegen.aot import compile_kernels
from flintc.codegen.cache import write_atomically
from flintc.ir.types import resolve


@dataclass(frozen=True, slots=True)
class Hop:
    """One launch of a step, in microseconds.

    hop: from the end of the launch before to its own, the last program's of each: hops add up to the step. ahead: how
    long before the launch before has ended half of its programs stand waiting (below 0: after). let_go: from that end
    until half of them go on; the last to do so. work: from going on to the end, half of the programs and the slowest.
    tail: from when half have ended until all have. fullest: most programs on one multiprocessor.
    """

    launch: str
    kernel: str
    programs: int
    hop: float
    ahead: float
    let_go: float
    last_let_go: float
    work: float
    slowest: float
    tail: float
    fullest: int

    def median_with(self, others: Sequence[Hop]) -> Hop:
        """The same launch, each figure the middle one of this step's and the ``others``'."""
        every = [asdict(hop) for hop in (self, *others)]
        figures = {k: median(each[k] for each in every) for k, v in every[0].items() if isinstance(v, float)}
        return Hop(**{**asdict(self), **figures, "fullest": max(each["fullest"] for each in every)})


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of ``batch`` sequences of ``context`` tokens. ms: of the step as it is; stamped_ms: with stamps."""

    spec: str
    weights: str
    context: int
    batch: int
    gpu: str
    ms: float
    stamped_ms: float
    hops: tuple[Hop, ...]

    def by_kernel(self) -> dict[str, Hop]:
        """The middle launch of each kernel, in the order in which kernels first run."""
        groups: dict[str, list[Hop]] = defaultdict(list)
        for hop in self.hops:
            groups[hop.kernel].append(hop)
        return {kernel: hops[0].median_with(hops[1:]) for kernel, hops in groups.items()}

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench timeline --json`` prints."""
        return asdict(self)


def measure_timeline(
    spec: str, weights: str, bundle: Path | None, context: int, batch: int, repeats: int, trace: Path | None
) -> Timeline:
    """Stamp a step, all layers and the final norm, ``repeats`` times; BackendError without a GPU.

    bundle: as for ``flintc bench forward``. trace: a file for a Chrome trace of the last step.
    """
    built, plain = step_of(spec, weights, bundle, context, batch)
    plan = stamped(built.plan)
    compiled = {name: made for (name, _), made in compile_kernels(plan.kernels.values(), [gpu_here()]).items()}
    bench = ForwardBench(plan, compiled, context, batch, plain.theta, given=plain.tensors)
    steps = [_one_step(bench, repeat) for repeat in range(repeats)]
    if trace is not None:
        write_atomically(trace, json.dumps(_chrome(bench)).encode())
    return Timeline(
        plan.graph.name, built.manifest.weights, context, batch, torch.cuda.get_device_name(),
        plain.time(part="body").median, bench.time(part="body").median,
        tuple(first.median_with(others) for first, *others in zip(*steps, strict=True)),
    )  # fmt: skip


def _one_step(bench: ForwardBench, repeat: int) -> list[Hop]:
    graph = bench.step.graph(bench.batch, "body")
    bench.set_rows(repeat)
    graph.replay()
    torch.cuda.synchronize()
    kernels = {x.name: bench.plan.kernel_for(x, bench.batch).name for x in bench.plan.launches}
    return hops_of(_stamps(bench), kernels)


def _stamps(bench: ForwardBench) -> dict[str, Tensor]:
    """Of each launch of the step, in order: i64[programs, COLUMNS] as its kernel left them."""
    env = {**bench.symbols, "B": bench.batch}
    launches, found = {x.name: x for x in bench.plan.launches}, {}
    for name in (launch.name for launch in bench.plan.graph.body):
        x, y, z = (resolve(d, env) for d in launches[name].grid)
        flat = bench.step.scratch[stamps_of(name)].flatten()[: x * y * z * COLUMNS]
        found[name] = flat.view(-1, COLUMNS).long().cpu()
    return found


def since(stamps: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``stamps`` with times as microseconds since a program of the first launch started: f64[programs, COLUMNS].

    The low word of the nanoseconds starts again every 4.3 seconds.
    """
    origin = next(iter(stamps.values()))[0, START].item()
    found = {}
    for name, of_launch in stamps.items():
        times = (of_launch - origin + (1 << 31)).remainder(1 << 32) - (1 << 31)
        found[name] = times.double() / 1e3
        found[name][:, PLACE] = of_launch[:, PLACE].double()
    return found


def hops_of(stamps: Mapping[str, Tensor], kernels: Mapping[str, str]) -> list[Hop]:
    """The hops of a step from the stamps of its launches, in order; ``kernels``: the kernel of each launch."""
    hops, before = list[Hop](), 0.0
    for name, times in since(stamps).items():
        start, waited, end = (times[:, column] for column in (START, WAITED, END))
        ended = float(end.max())
        hops.append(Hop(
            name, kernels[name], len(times), ended - before,
            ahead=before - float(start.median()), let_go=float(waited.median()) - before,
            last_let_go=float(waited.max()) - before, work=float((end - waited).median()),
            slowest=float((end - waited).max()), tail=ended - float(end.median()),
            fullest=int(times[:, PLACE].long().bincount().max()),
        ))  # fmt: skip
        before = ended
    return hops


def _chrome(bench: ForwardBench) -> dict[str, Any]:
    """The last step as a Chrome trace: of each launch the waiting, then the work of its programs as one."""
    events = []
    for at, (name, times) in enumerate(since(_stamps(bench)).items()):
        start, waited, end = float(times[:, START].min()), float(times[:, WAITED].median()), float(times[:, END].max())
        for what, begin, until in (("waits", start, waited), ("works", waited, end)):
            events.append({"name": f"{name} {what}", "ph": "X", "ts": begin, "dur": until - begin, "pid": 0,
                           "tid": at % 3})  # fmt: skip
    return {"traceEvents": events}
