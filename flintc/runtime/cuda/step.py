"""One forward step on the GPU: device memory for a plan, and a CUDA graph for each batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from flintc.errors import BackendError
from flintc.ir.plan import Arg, CompiledKernel, Plan, PlannedLaunch
from flintc.ir.types import resolve
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.cuda.driver import LoadedKernel, PreparedLaunch, load_kernel
from flintc.runtime.values import TORCH_DTYPES, for_kernels, zeroed

#: How much of a step to run: without the output head (for tokens of a prompt that nobody continues from), with it, or
#: with the choice of the next tokens.
Part = Literal["body", "logits", "tokens"]


class DeviceStep:
    """Buffers, kernels and graphs that run ``plan`` for each of ``batches`` rows.

    ``tensors`` holds every weight, table, cache and input of the plan's graph by value name; inputs are written by the
    caller between steps. ``symbols`` gives every run-time symbol except ``B``. Graphs are captured on first use.
    ``dependent`` False launches everything without overlap, for comparison.
    """

    def __init__(
        self,
        plan: Plan,
        compiled: Mapping[str, CompiledKernel],
        tensors: Mapping[str, Tensor | Nvfp4],
        symbols: Mapping[str, int],
        batches: Sequence[int],
        *,
        dependent: bool = True,
    ) -> None:
        self.plan = plan
        self.batches = tuple(sorted(batches))
        self.symbols = dict(symbols)
        self.tensors = for_kernels(tensors)
        self._dependent = dependent
        self._first = plan.graph.first_versions
        self.device = next(t.device for t in tensors.values() if isinstance(t, Tensor))
        self.kernels: dict[str, LoadedKernel] = {
            name: load_kernel(kernel, compiled[name]) for name, kernel in plan.kernels.items()
        }
        env = {**self.symbols, "B": self.batches[-1]}
        self.buffers = {name: self._allocate(b.nbytes(env)) for name, b in plan.buffers.items()}
        memory = {**plan.scratch, **(plan.sampler.memory if plan.sampler else {})}
        allocated = zeroed(memory, env, self.device)
        #: Arrival counters of the step, and memory of the sampler.
        self.scratch = {name: allocated[name] for name in plan.scratch}
        self.sampler = {name: allocated[name] for name in memory if name not in plan.scratch}
        self._graphs: dict[tuple[int, Part], torch.cuda.CUDAGraph] = {}
        self._launches: dict[int, dict[str, PreparedLaunch]] = {}

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of activations and counters, and of the sampler."""
        owned = (*self.buffers.values(), *self.scratch.values(), *self.sampler.values())
        return sum(t.numel() * t.element_size() for t in owned)

    def value(self, name: str, rows: int) -> Tensor:
        """View of an activation as the plan's kernels see it in a step of ``rows`` rows."""
        value = self.plan.graph.values[name]
        env = {**self.symbols, "B": rows}
        shape = [resolve(d, env) for d in value.type.shape]
        data = self.buffers[self.plan.placement[name]][: value.type.nbytes(env)]
        return data.view(TORCH_DTYPES[value.type.dtype]).view(shape)

    def launches(self, rows: int, part: Part = "logits") -> list[PreparedLaunch]:
        """The launches of ``part`` with arguments packed for a batch of ``rows``."""
        if rows not in self._launches:
            env = {**self.symbols, "B": rows}
            planned = (*self.plan.launches, *(self.plan.sampler.launches if self.plan.sampler else ()))
            self._launches[rows] = {launch.name: self._prepare(launch, env) for launch in planned}
        return [self._launches[rows][name] for name in self._names(part)]

    def _names(self, part: Part) -> list[str]:
        if part == "body":
            return [launch.name for launch in self.plan.graph.body]
        names = [launch.name for launch in self.plan.launches]
        if part == "logits":
            return names
        if self.plan.sampler is None:
            raise BackendError("the plan has no sampler", remedy="compile the bundle again with this flintc")
        return names + [launch.name for launch in self.plan.sampler.launches]

    def _prepare(self, launch: PlannedLaunch, env: Mapping[str, int]) -> PreparedLaunch:
        kernel = self.plan.kernel_for(launch, env["B"])
        x, y, z = (resolve(d, env) for d in launch.grid)
        return PreparedLaunch(
            self.kernels[kernel.name],
            (x, y, z),
            [p.type for p in kernel.params],
            [self._argument(a, env) for a in launch.args],
            dependent=self._dependent,
        )

    def _argument(self, arg: Arg, env: Mapping[str, int]) -> int:
        if arg.kind == "symbol":
            return env[arg.ref]
        if arg.kind == "scratch":
            return (self.scratch if arg.ref in self.scratch else self.sampler)[arg.ref].data_ptr()
        if arg.kind == "part":
            name, _, part = arg.ref.partition("#")
            packed = self.tensors[name]
            tensor = getattr(packed, part)
            assert isinstance(tensor, Tensor)
            return tensor.data_ptr()
        if arg.ref in self.plan.placement:
            return self.buffers[self.plan.placement[arg.ref]].data_ptr()
        return self._tensor(self.stored(arg.ref)).data_ptr()

    def _tensor(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def stored(self, value: str) -> str:
        """Name in ``tensors`` of the memory that holds ``value``: a cache version lives where its first one does."""
        return self._first.get(value, value)

    def run(self, rows: int, part: Part = "logits") -> None:
        """Enqueue one step without a graph, on the current stream."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for launch in self.launches(rows, part):
            launch(stream)

    def graph(self, rows: int, part: Part = "logits") -> torch.cuda.CUDAGraph:
        """The captured step for a batch of exactly ``rows`` rows."""
        if (rows, part) not in self._graphs:
            if rows > self.batches[-1]:
                raise BackendError(f"a batch of {rows} exceeds the largest captured one, {self.batches[-1]}")
            self._graphs[rows, part] = self._capture(rows, part)
        return self._graphs[rows, part]

    def _capture(self, rows: int, part: Part) -> torch.cuda.CUDAGraph:
        seqs = self._tensor("seqs")
        given = seqs.clone()
        seqs.fill_(-1)
        self.run(rows, part)  # of no sequence: kernels are loaded for good before they are captured, and do nothing
        seqs.copy_(given)
        return captured(self.launches(rows, part), self.device)

    def replay(self, rows: int, part: Part = "logits") -> None:
        """Run one captured step of ``rows`` rows on the current stream."""
        self.graph(rows, part).replay()


def captured(launches: Sequence[PreparedLaunch], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``launches``, one after the other, each loaded before."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for launch in launches:
            launch(stream.cuda_stream)
        graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph
