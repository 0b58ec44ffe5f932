"""Steps of tiny-flint on the GPU without a reference: for tests that compare one way of running with another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from device_cases import PIPELINE, symbols, target
from torch import Tensor

from flintc import api
from flintc.bench.synthetic import tensors
from flintc.codegen.aot import compile_kernels
from flintc.codegen.planner import plan
from flintc.codegen.sampler import with_sampler
from flintc.ir.plan import CompiledKernel, Kernel, Plan
from flintc.reference import Nvfp4
from flintc.runtime.cuda.step import DeviceStep
from flintc.spec import bind_defaults, load_spec

FUSED = PIPELINE[-1]
SLOTS = 8
CONTEXT = 512

_LINGER = '''
@triton.jit
def linger():
    """Keep the program busy for 30 microseconds."""
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < 30000:
        now = tl.extra.cuda.globaltimer()

'''


@cache
def planned(weights: str) -> Plan:
    """Plan of the whole pipeline, with a sampler."""
    graph = api.run_passes(bind_defaults(load_spec("tiny-flint")), weights, stop_after=FUSED).graph
    return with_sampler(plan(graph))


@cache
def machine_code(weights: str) -> Mapping[str, CompiledKernel]:
    """Its kernels for the GPU that is here."""
    made = planned(weights)
    return compiled(tuple(made.kernels.values()))


def compiled(kernels: Sequence[Kernel]) -> dict[str, CompiledKernel]:
    """``kernels`` by name, for the GPU that is here."""
    built = compile_kernels(kernels, [target()])
    return {kernel.name: built[kernel.name, target()] for kernel in kernels}


def slowed(kernel: Kernel) -> Kernel:
    """``kernel`` with every program idling between its wait and what follows."""
    head, entry = kernel.source.split(f"@triton.jit\ndef {kernel.name}(")
    slow, count = re.subn(r"^( +)wait_for_producers\(\)$", r"\1wait_for_producers()\n\1linger()", entry, flags=re.M)
    assert count > 0, f"{kernel.name} never waits"
    return replace(kernel, source=f"{head}{_LINGER.lstrip()}\n@triton.jit\ndef {kernel.name}({slow}")


def hasty(kernel: Kernel) -> Kernel:
    """``kernel`` without its wait."""
    return replace(kernel, source=kernel.source.replace("        tl.extra.cuda.gdc_wait()\n", "        pass\n"))


@dataclass
class Replay:
    """A step whose inputs, caches and buffers can be set, and everything that it leaves."""

    step: DeviceStep
    rows: int
    given: dict[str, Tensor | Nvfp4]

    def set_rows(self, seed: int, positions: Sequence[int], seqs: Sequence[int]) -> None:
        """Random tokens at ``positions`` of the sequences ``seqs`` (-1: no sequence)."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 512, (self.rows,), generator=generator)
        for name, values in (("ids", ids.tolist()), ("positions", positions), ("seqs", seqs)):
            self._tensor(name)[: self.rows] = torch.tensor(values, dtype=torch.int32, device="cuda")

    def poison(self) -> None:
        """NaN, as an index -1, in every buffer."""
        for buffer in self.step.buffers.values():
            buffer.fill_(0xFF)

    def reset_caches(self) -> None:
        """The caches as they were before the first step."""
        for name, tensor in self.given.items():
            if isinstance(tensor, Tensor) and self.step.plan.graph.values[name].kind == "cache":
                self._tensor(name).copy_(tensor)

    def left(self) -> dict[str, Tensor]:
        """Copies of the logits and of every cache, as bits."""
        logits = self.step.plan.graph.outputs[0]
        found = {logits: self.step.value(logits, self.rows)}
        found |= {
            n: self._tensor(n) for n, v in self.step.plan.graph.values.items() if v.kind == "cache" and n in self.given
        }
        return {name: t.clone().view(torch.uint8) for name, t in found.items()}

    def replayed(self) -> dict[str, Tensor]:
        """What a replay of the graph leaves, from poisoned buffers and fresh caches."""
        self.reset_caches()
        self.poison()
        self.step.replay(self.rows)
        return self.left()

    def _tensor(self, name: str) -> Tensor:
        tensor = self.step.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor


def make_replay(
    weights: str, rows: int, kernels: Mapping[str, CompiledKernel] | None = None, *, dependent: bool = True
) -> Replay:
    """A step of ``rows`` rows with room for CONTEXT tokens in each of SLOTS sequences; ``kernels`` replace some."""
    made = planned(weights)
    env = symbols(made.graph, CONTEXT, SLOTS)
    given = _given(weights)
    on_gpu = {name: t.to("cuda", copy=True) if isinstance(t, Tensor) else t.to("cuda") for name, t in given.items()}
    code = {**machine_code(weights), **(kernels or {})}
    return Replay(DeviceStep(made, code, on_gpu, env, (rows,), dependent=dependent), rows, given)


@cache
def _given(weights: str) -> dict[str, Tensor | Nvfp4]:
    made = planned(weights)
    return {
        n: t.to("cuda") for n, t in tensors(made.graph, symbols(made.graph, CONTEXT, SLOTS), 10000.0, "cpu", 7).items()
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose bits differ."""
    return [name for name in one if not torch.equal(one[name], other[name])]
