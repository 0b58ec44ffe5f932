"""Steps for tests on the GPU: weights, caches and inputs of a small model, and each value as the reference has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flintc import api
from flintc.bench.synthetic import tensors
from flintc.codegen.aot import compile_kernels
from flintc.codegen.planner import plan
from flintc.ir.graph import Graph, Op
from flintc.ir.plan import CompiledKernel, Plan
from flintc.passes import BASELINE
from flintc.reference import Nvfp4, run
from flintc.runtime.cuda.step import DeviceStep
from flintc.spec import bind_defaults, load_spec

CONTEXT, SLOTS = 96, 8
#: Positions of the rows of a step: the window's edge (13 in tiny-flint), chunk edges (16), a long and a fresh one.
POSITIONS = (12, 0, 90, 13, 14, 31, 32, 47)
PIPELINE = (BASELINE, *load_spec("tiny-flint").pipeline)


def target() -> str:
    """The compile target of the GPU that is here."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@cache
def built(spec: str, weights: str, after: str) -> tuple[Plan, Mapping[str, CompiledKernel]]:
    """Plan and kernels of ``spec`` after a pass, compiled for the GPU that is here."""
    graph = api.run_passes(bind_defaults(load_spec(spec)), weights, stop_after=after).graph
    made = plan(graph)
    compiled = compile_kernels(made.kernels.values(), [target()])
    return made, {name: compiled[name, target()] for name in made.kernels}


def symbols(graph: Graph, context: int = CONTEXT, slots: int = SLOTS) -> dict[str, int]:
    """Run-time symbols of a small step with room for ``context`` tokens in each of ``slots``."""
    page = next(v.type.shape[3] for v in graph.values.values() if v.kind == "cache")
    assert isinstance(page, int)
    columns = -(-context // page)
    return {"B": 8, "Q": slots, "T": columns, "P": columns * slots, "C": context}


@dataclass
class Case:
    """Tensors of a step on the CPU (``given``) and on the GPU, and what the reference makes of it (on the CPU)."""

    plan: Plan
    step: DeviceStep
    given: Mapping[str, Tensor | Nvfp4]
    values: dict[str, Tensor]
    rows: int

    def reset(self) -> None:
        """NaN in every buffer, so that a value nothing wrote shows."""
        for buffer in self.step.buffers.values():
            buffer.fill_(0xFF)


def make_case(spec: str, weights: str, after: str, rows: int, padded: Sequence[int] = (), seed: int = 0) -> Case:
    """A step of ``rows`` rows at POSITIONS; rows in ``padded`` belong to no sequence."""
    made, compiled = built(spec, weights, after)
    env = {**symbols(made.graph), "B": rows}
    given = tensors(made.graph, {**env, "B": 8}, 10000.0, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    _fill(given, "ids", torch.randint(0, 500, (rows,), generator=generator).tolist())
    _fill(given, "positions", [0 if r in padded else POSITIONS[r] for r in range(rows)])
    _fill(given, "seqs", [-1 if r in padded else (3 * r) % SLOTS for r in range(rows)])
    on_gpu = {name: t.to("cuda") for name, t in given.items()}
    cpu = {n: t[:rows] if n in ("ids", "positions", "seqs") else t for n, t in given.items()}  # type: ignore[index]
    values: dict[str, Tensor] = {}

    def record(op: Op, results: Mapping[str, Tensor]) -> None:
        values.update((name, t.clone()) for name, t in results.items())

    run(made.graph, cpu, trace=record)
    return Case(made, DeviceStep(made, compiled, on_gpu, env, (rows,)), cpu, values, rows)


def _fill(given: Mapping[str, Tensor | Nvfp4], name: str, values: Sequence[int]) -> None:
    tensor = given[name]
    assert isinstance(tensor, Tensor)
    tensor[: len(values)] = torch.tensor(values, dtype=torch.int32)
