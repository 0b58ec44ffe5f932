"""One forward step on the GPU: device memory for a plan, and a CUDA graph for each batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flintc.errors import BackendError
from flintc.ir.plan import Arg, CompiledKernel, Plan, PlannedLaunch
from flintc.ir.types import resolve
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.cuda.driver import LoadedKernel, PreparedLaunch, load_kernel
from flintc.runtime.values import TORCH_DTYPES, first_versions, for_kernels


class DeviceStep:
    """Buffers, kernels and graphs that run ``plan`` for each of ``batches`` rows.

    ``tensors`` holds every weight, table, cache and input of the plan's graph by value name; inputs are written by the
    caller between steps. ``symbols`` gives every run-time symbol except ``B``. Graphs are captured on first use.
    """

    def __init__(
        self,
        plan: Plan,
        compiled: Mapping[str, CompiledKernel],
        tensors: Mapping[str, Tensor | Nvfp4],
        symbols: Mapping[str, int],
        batches: Sequence[int],
    ) -> None:
        self.plan = plan
        self.batches = tuple(sorted(batches))
        self.symbols = dict(symbols)
        self.tensors = for_kernels(tensors)
        self._first = first_versions(plan.graph)
        self.device = next(t.device for t in tensors.values() if isinstance(t, Tensor))
        self.kernels: dict[str, LoadedKernel] = {
            name: load_kernel(kernel, compiled[name]) for name, kernel in plan.kernels.items()
        }
        self._largest = {**self.symbols, "B": self.batches[-1]}
        self.buffers = {name: self._allocate(b.nbytes(self._largest)) for name, b in plan.buffers.items()}
        self.scratch = {
            name: torch.zeros(s.type.size(self._largest), dtype=torch.int32, device=self.device)
            for name, s in plan.scratch.items()
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._launches: dict[int, list[PreparedLaunch]] = {}

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of activations and counters."""
        return sum(t.numel() * t.element_size() for t in (*self.buffers.values(), *self.scratch.values()))

    def value(self, name: str, rows: int) -> Tensor:
        """View of an activation as the plan's kernels see it in a step of ``rows`` rows."""
        value = self.plan.graph.values[name]
        env = {**self.symbols, "B": rows}
        shape = [resolve(d, env) for d in value.type.shape]
        data = self.buffers[self.plan.placement[name]][: value.type.nbytes(env)]
        return data.view(TORCH_DTYPES[value.type.dtype]).view(shape)

    def launches(self, rows: int) -> list[PreparedLaunch]:
        """The plan's launches with arguments packed for a batch of ``rows``."""
        if rows not in self._launches:
            env = {**self.symbols, "B": rows}
            self._launches[rows] = [self._prepare(launch, env) for launch in self.plan.launches]
        return self._launches[rows]

    def _prepare(self, launch: PlannedLaunch, env: Mapping[str, int]) -> PreparedLaunch:
        kernel = self.plan.kernels[launch.kernel]
        x, y, z = (resolve(d, env) for d in launch.grid)
        return PreparedLaunch(
            self.kernels[launch.kernel],
            (x, y, z),
            [p.type for p in kernel.params],
            [self._argument(a, env) for a in launch.args],
        )

    def _argument(self, arg: Arg, env: Mapping[str, int]) -> int:
        if arg.kind == "symbol":
            return env[arg.ref]
        if arg.kind == "scratch":
            return self.scratch[arg.ref].data_ptr()
        if arg.kind == "part":
            name, _, part = arg.ref.partition("#")
            packed = self.tensors[name]
            tensor = getattr(packed, part)
            assert isinstance(tensor, Tensor)
            return tensor.data_ptr()
        if arg.ref in self.plan.placement:
            return self.buffers[self.plan.placement[arg.ref]].data_ptr()
        tensor = self.tensors[self.stored(arg.ref)]
        assert isinstance(tensor, Tensor)
        return tensor.data_ptr()

    def stored(self, value: str) -> str:
        """Name in ``tensors`` of the memory that holds ``value``: a cache version lives where its first one does."""
        return self._first.get(value, value)

    def run(self, rows: int) -> None:
        """Enqueue one step without a graph, on the current stream."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for launch in self.launches(rows):
            launch(stream)

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """The captured step for a batch of exactly ``rows`` rows."""
        if rows not in self._graphs:
            if rows > self.batches[-1]:
                raise BackendError(f"a batch of {rows} exceeds the largest captured one, {self.batches[-1]}")
            self.run(rows)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run(rows)
            self._graphs[rows] = graph
        return self._graphs[rows]

    def replay(self, rows: int) -> None:
        """Run one captured step of ``rows`` rows on the current stream."""
        self.graph(rows).replay()
