"""Runs single launches of a plan on given values: in torch, in Triton's interpreter, or on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flintc.codegen.interpret import load_interpreted
from flintc.ir.graph import Graph, Launch
from flintc.ir.plan import Arg, CompiledKernel, Kernel, Plan, PlannedLaunch
from flintc.ir.types import resolve
from flintc.reference import Nvfp4, run_launch
from flintc.runtime.values import TORCH_DTYPES, for_kernels

Values = Mapping[str, Tensor | Nvfp4]


class Runner(Protocol):
    """Runs launches of ``graph``; ``name`` says how, ``device`` where its tensors live."""

    name: str
    graph: Graph
    device: str

    def run(self, launch: Launch, values: Values, env: Mapping[str, int]) -> dict[str, Tensor]:
        """The activations that ``launch`` makes from ``values``; caches are written in place.

        ``env`` gives every run-time symbol. What a launch leaves unwritten is NaN, or -1.
        """
        ...


class ReferenceRunner:
    """Every op in torch, at the rounding points."""

    name = "reference"

    def __init__(self, graph: Graph, device: str = "cpu") -> None:
        self.graph, self.device = graph, device

    def run(self, launch: Launch, values: Values, env: Mapping[str, int]) -> dict[str, Tensor]:
        """See :class:`Runner`; every value the ops make, inner ones too."""
        made = run_launch(self.graph, launch, values)
        return {name: t for name, t in made.items() if self.graph.values[name].kind == "activation"}


class _KernelRunner:
    """Finds a launch's kernel arguments among values, fresh outputs and counters."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.graph, self.device = plan, plan.graph, device
        self._planned = {planned.name: planned for planned in plan.launches}

    def run(self, launch: Launch, values: Values, env: Mapping[str, int]) -> dict[str, Tensor]:
        """See :class:`Runner`; what the kernel is passed, which leaves out values that stay in registers."""
        planned = self._planned[launch.name]
        made = {name: self._poisoned(name, env) for name in self._made(launch, planned)}
        packed = {arg.ref.partition("#")[0] for arg in planned.args if arg.kind == "part"}
        weights = for_kernels({name: values[name] for name in packed})
        pointers = {**values, **self._written(launch, values), **made, **weights}
        arguments = [self._argument(arg, pointers, env) for arg in planned.args]
        x, y, z = (resolve(d, env) for d in planned.grid)
        self.call(self.plan.kernel_for(planned, env["B"]), (x, y, z), arguments)
        return made

    def call(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Tensor | int]) -> None:
        """Run the kernel."""
        raise NotImplementedError

    def _made(self, launch: Launch, planned: PlannedLaunch) -> list[str]:
        members = set(launch.ops)
        names = dict.fromkeys(arg.ref for arg in planned.args if arg.kind == "value")
        inside = [n for n in names if self.graph.producers.get(n) in members]
        return [n for n in inside if self.graph.values[n].kind == "activation"]

    def _written(self, launch: Launch, values: Values) -> dict[str, Tensor | Nvfp4]:
        """The cache version that the launch makes, in the memory of the one it reads."""
        writes = [self.graph.ops[o] for o in launch.ops if self.graph.ops[o].kind == "kv_write"]
        return {op.outputs[0]: values[op.inputs[2]] for op in writes}

    def _poisoned(self, name: str, env: Mapping[str, int]) -> Tensor:
        type = self.graph.values[name].type
        shape = [resolve(d, env) for d in type.shape]
        poison = -1 if type.dtype == "i32" else torch.nan
        return torch.full(shape, poison, dtype=TORCH_DTYPES[type.dtype], device=self.device)

    def _argument(self, arg: Arg, pointers: Values, env: Mapping[str, int]) -> Tensor | int:
        if arg.kind == "symbol":
            return env[arg.ref]
        if arg.kind == "scratch":
            type = self.plan.scratch[arg.ref].type
            return torch.zeros([resolve(d, env) for d in type.shape], dtype=torch.int32, device=self.device)
        name, _, part = arg.ref.partition("#")
        given = pointers[name]
        argument: Tensor = getattr(given, part) if isinstance(given, Nvfp4) else given
        return argument


class InterpretRunner(_KernelRunner):
    """The generated kernels in Triton's interpreter."""

    name = "interpret"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, "cpu")
        self._kernels = {name: load_interpreted(kernel) for name, kernel in plan.kernels.items()}

    def call(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Tensor | int]) -> None:
        """See :class:`_KernelRunner`."""
        self._kernels[kernel.name](grid, arguments)


class CudaRunner(_KernelRunner):
    """Compiled kernels on the GPU, one launch at a time."""

    name = "cuda"

    def __init__(self, plan: Plan, compiled: Mapping[str, CompiledKernel]) -> None:
        from flintc.runtime.cuda.driver import load_kernel

        super().__init__(plan, "cuda")
        torch.zeros(1, device="cuda")  # the driver calls below need torch's context
        self._kernels = {name: load_kernel(kernel, compiled[name]) for name, kernel in plan.kernels.items()}

    def call(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Tensor | int]) -> None:
        """See :class:`_KernelRunner`."""
        from flintc.runtime.cuda.driver import PreparedLaunch

        addresses: list[Any] = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        types = [p.type for p in kernel.params]
        launch = PreparedLaunch(self._kernels[kernel.name], grid, types, addresses, dependent=False)
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
