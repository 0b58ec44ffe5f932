"""Inputs for the graphs of ``gemv_graphs``, and their kernels run in the interpreter between guarded buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from launches import TORCH, poisoned, run_plan
from torch import Tensor

from flintc.codegen.planner import plan
from flintc.ir.graph import Graph
from flintc.ir.types import TensorType, resolve
from flintc.reference import Nvfp4, run_launch
from flintc.runtime.values import for_kernels

#: Elements before and after each buffer: more than a ragged tile could run over by.
GUARD = 1 << 16

Inputs = dict[str, Tensor | Nvfp4]


@dataclass(frozen=True)
class Guarded:
    """A tensor between two stretches of memory that no kernel may touch: NaN, so that reading them shows too."""

    buffer: Tensor
    view: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Guarded:
        """A copy of ``tensor``, guarded."""
        poison = torch.nan if tensor.is_floating_point() else 0x55
        buffer = torch.full((tensor.numel() + 2 * GUARD,), poison, dtype=tensor.dtype)
        view = buffer[GUARD:-GUARD].view(tensor.shape)
        view.copy_(tensor)
        return Guarded(buffer, view)

    def check(self, name: str) -> None:
        """Fail if a guard has been written."""
        for guard in (self.buffer[:GUARD], self.buffer[-GUARD:]):
            intact = guard.isnan() if guard.is_floating_point() else guard == 0x55
            assert intact.all(), f"{name}: written outside its {list(self.view.shape)}"


def interpret(graph: Graph, given: Mapping[str, Tensor | Nvfp4], **env: int) -> dict[str, Tensor]:
    """Every activation and cache that the kernels of ``graph`` write. ``given`` is left alone."""
    planned = plan(graph)
    held = {name: Guarded.of(t) for name, t in _parts(given).items()}
    held |= {name: Guarded.of(poisoned(graph.values[name].type, env)) for name in planned.placement}
    for op in graph.ops.values():
        if op.kind == "kv_write":
            held[op.outputs[0]] = held[op.inputs[2]]
    scratch = {
        name: torch.zeros([resolve(d, env) for d in s.type.shape], dtype=TORCH[s.type.dtype])
        for name, s in planned.scratch.items()
    }
    assert run_plan(planned, {n: g.view for n, g in held.items()}, scratch, env) == len(graph.launches)
    for name, guarded in held.items():
        guarded.check(name)
    for name, counters in scratch.items():
        assert not counters.any(), f"{name} is not back at zero"
    return {name: held[name].view for op in graph.ops.values() for name in op.outputs if name in held}


def reference(graph: Graph, given: Mapping[str, Tensor | Nvfp4]) -> dict[str, Tensor]:
    """Every value that the ops of ``graph`` make. ``given`` is left alone."""
    values: Inputs = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
    for launch in graph.launches:
        values.update(run_launch(graph, launch, values))
    return {n: v for n, v in values.items() if n in graph.producers and isinstance(v, Tensor)}


def _parts(given: Mapping[str, Tensor | Nvfp4]) -> dict[str, Tensor]:
    """Tensors by the names that launches pass: a packed weight as its three components."""
    tensors: dict[str, Tensor] = {}
    for name, value in for_kernels(given).items():
        if isinstance(value, Nvfp4):
            tensors |= {f"{name}#codes": value.codes, f"{name}#scales": value.scales, f"{name}#scale": value.scale}
        else:
            tensors[name] = value
    return tensors


@dataclass
class Data:
    """Random values. ``exact``: eighths up to 1, whose products and sums FP32 holds exactly in any order."""

    batch: int
    seed: int = 0
    exact: bool = False

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def inputs(self, graph: Graph, **given: Tensor) -> Inputs:
        """A tensor for everything ``graph`` is given and ``given`` leaves out."""
        values: Inputs = dict(given)
        for value in graph.values.values():
            if value.name in values or value.name in graph.producers:
                continue
            values[value.name] = self.of(value.type, value.kind == "weight")
        return values

    def of(self, type: TensorType, is_weight: bool) -> Tensor | Nvfp4:
        """A tensor of ``type``, its first dimension ``B`` being the batch."""
        shape = [resolve(d, {"B": self.batch}) for d in type.shape]
        if type.dtype == "nvfp4":
            return self.packed(shape)
        if self.exact:
            return (torch.randint(-8, 9, shape, generator=self.random) / 8).to(TORCH[type.dtype])
        size = shape[-1] ** -0.5 if is_weight and len(shape) > 1 else 1.0
        return (torch.randn(shape, generator=self.random) * size).to(TORCH[type.dtype])

    def packed(self, shape: list[int]) -> Nvfp4:
        """Every code, block scales of many sizes (a few when exact), and a scale of its own for every row."""
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=self.random, dtype=torch.uint8)
        blocks = (*shape[:-1], shape[-1] // 16)
        if self.exact:
            scales = torch.tensor([0.0, 0.25, 0.5, 0.75])[torch.randint(0, 4, blocks, generator=self.random)]
            rows = 2.0 ** torch.randint(-2, 3, shape[:-1], generator=self.random)
        else:
            scales = torch.rand(blocks, generator=self.random) * 4
            rows = (torch.rand(shape[:-1], generator=self.random) + 0.5) * shape[-1] ** -0.5
        return Nvfp4(codes, scales.to(torch.float8_e4m3fn).view(torch.uint8), rows.float())

    def chosen(self, experts: int, ranks: int) -> Tensor:
        """Distinct experts for each row: i32 [batch, ranks]."""
        rows = [torch.randperm(experts, generator=self.random)[:ranks] for _ in range(self.batch)]
        return torch.stack(rows).int()

    def mix(self, ranks: int) -> Tensor:
        """Routing weights that add up to one: f32 [batch, ranks]."""
        weights = torch.rand(self.batch, ranks, generator=self.random) + 0.1
        return weights / weights.sum(-1, keepdim=True)


def rows_of(given: Mapping[str, Tensor | Nvfp4], graph: Graph, row: int) -> Inputs:
    """The same inputs with only ``row`` of everything that has a row per vector."""
    single: Inputs = {}
    for name, value in given.items():
        per_row = isinstance(value, Tensor) and graph.values[name].type.shape[:1] == ("B",)
        single[name] = value[row : row + 1] if per_row and isinstance(value, Tensor) else value
    return single
