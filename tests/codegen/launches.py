"""Small graphs for tests of kernels, and the generated kernels run on given tensors: interpreted, or on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_kernels import load_on_gpu
from torch import Tensor

from flintc.codegen.interpret import load_interpreted
from flintc.codegen.planner import plan
from flintc.ir.graph import Attr, Graph, Launch, Op, Value, ValueKind
from flintc.ir.ops import OPS, infer
from flintc.ir.plan import Kernel, Plan
from flintc.ir.types import DType, TensorType, resolve

TORCH: dict[DType, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}


@dataclass
class Maker:
    """Collects values and ops; output types come from the ops' own inference."""

    values: dict[str, Value] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)

    def given(self, name: str, dtype: DType, *shape: int | str, kind: ValueKind = "input") -> str:
        """A value from outside."""
        self.values[name] = Value(name, TensorType(dtype, shape), kind)
        return name

    def op(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Attr) -> Sequence[str]:
        """An op named after its first output."""
        defaults = {k: v for k, v in OPS[kind].attrs.items() if v is not ...}
        full: dict[str, Attr] = {**defaults, **attrs}  # type: ignore[dict-item]
        types = infer(kind, tuple(self.values[v].type for v in inputs), full)
        for name, type in zip(outputs, types, strict=True):
            self.values[name] = Value(name, type, "cache" if kind == "kv_write" else "activation")
        op = Op(f"make_{outputs[0]}", kind, tuple(inputs), tuple(outputs), full)
        self.ops[op.name] = op
        return outputs

    def graph(self, *outputs: str, role: str | None = None) -> Graph:
        """One launch per op, or all ops in one launch of ``role``."""
        launches = tuple(Launch(op.name, op.kind, (op.name,)) for op in self.ops.values())
        if role is not None:
            launches = (Launch("launch", role, tuple(self.ops)),)
        return Graph("test", self.values, self.ops, launches, outputs)


def poisoned(type: TensorType, env: Mapping[str, int]) -> Tensor:
    """A tensor no kernel has written yet: NaN, or for integers 0x55, since -1 says that a row has no expert."""
    shape = [resolve(d, env) for d in type.shape]
    return torch.full(shape, 0x55 if type.dtype == "i32" else torch.nan, dtype=TORCH[type.dtype])


def interpret(graph: Graph, given: Mapping[str, Tensor], **env: int) -> dict[str, Tensor]:
    """Plan ``graph`` and run its kernels in the interpreter; returns the tensor of every activation passed.

    ``given`` tensors are not copied: a cache is written in place. Arrival counters must end as they began, at zero.
    """
    planned = plan(graph)
    tensors = dict(given)
    for op in graph.ops.values():
        if op.kind == "kv_write":
            tensors[op.outputs[0]] = tensors[op.inputs[2]]
    for name in planned.placement:
        tensors[name] = poisoned(graph.values[name].type, env)
    scratch = {
        name: torch.zeros([resolve(d, env) for d in s.type.shape], dtype=TORCH[s.type.dtype])
        for name, s in planned.scratch.items()
    }
    run_plan(planned, tensors, scratch, env)
    for name, counters in scratch.items():
        assert not counters.any(), f"{name} is not back at zero"
    return {name: tensors[name] for name in planned.placement}


#: How :func:`load` runs kernels; the fixture ``machine`` sets it.
LOADERS: dict[str, Callable[[Kernel], Callable[[tuple[int, int, int], Sequence[Any]], None]]] = {
    "interpreter": load_interpreted,
    "gpu": load_on_gpu,
}
MACHINE = ["interpreter"]


def load(kernel: Kernel) -> Callable[[tuple[int, int, int], Sequence[Any]], None]:
    """The kernel as a function of a grid and its arguments: CPU tensors and ints, in parameter order."""
    return LOADERS[MACHINE[0]](kernel)


def run_plan(
    planned: Plan, tensors: Mapping[str, Tensor], scratch: Mapping[str, Tensor], env: Mapping[str, int]
) -> int:
    """Call each planned launch's kernel in order; returns the number of calls."""
    calls = 0
    for launch in planned.launches:
        args: list[Tensor | int] = []
        for arg in launch.args:
            if arg.kind == "symbol":
                args.append(env[arg.ref])
            else:
                args.append((scratch if arg.kind == "scratch" else tensors)[arg.ref])
        x, y, z = (resolve(d, env) for d in launch.grid)
        load(planned.kernel_for(launch, env["B"]))((x, y, z), args)
        calls += 1
    return calls


def only_kernel(graph: Graph) -> Kernel:
    """The kernel of a graph of one launch, at one row."""
    made = plan(graph)
    (launch,) = made.launches
    return made.kernel_for(launch, 1)
