"""One forward step of a whole model on the GPU, timed: weights synthesised, every KV page its own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flintc.bench.synthetic import tensors
from flintc.bench.timing import Timing, device_events, time_device, us_in_chain
from flintc.errors import VerificationError
from flintc.ir.plan import Buffer, CompiledKernel, Plan, PlannedLaunch
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.cuda.driver import PreparedLaunch
from flintc.runtime.cuda.step import DeviceStep, Part, captured

BATCHES = (1, 2, 4, 8)


def symbols_for(plan: Plan, context: int, sequences: int) -> dict[str, int]:
    """Run-time symbols of ``sequences`` sequences of up to ``context`` tokens each, ``B`` at the largest batch."""
    page = next(v.type.shape[3] for v in plan.graph.values.values() if v.kind == "cache")
    assert isinstance(page, int)
    columns = -(-context // page)
    return {
        "B": BATCHES[-1],
        "Q": sequences,
        "T": columns,
        "P": columns * sequences,
        "C": context,
    }


@dataclass(frozen=True, slots=True)
class Event:
    """Something the GPU did: start and duration in microseconds."""

    name: str
    start: float
    us: float


def check_launches(where: str, counted: int, planned: int) -> None:
    """VerificationError, saying ``where``, unless the profiler has counted the launches that were planned."""
    if counted != planned:
        raise VerificationError(f"{where}: the profiler counts {counted} launches, the plan has {planned}")


@dataclass
class ForwardBench:
    """A plan with synthetic weights and full caches of ``context`` tokens for ``rows`` sequences.

    ``given`` are tensors shared with another bench of the same model.
    """

    plan: Plan
    compiled: Mapping[str, CompiledKernel]
    context: int
    rows: int = 1
    theta: float = 10000.0
    seed: int = 0
    given: Mapping[str, Tensor | Nvfp4] | None = None

    @cached_property
    def symbols(self) -> dict[str, int]:
        """See :func:`symbols_for`."""
        return symbols_for(self.plan, self.context, self.rows)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor | Nvfp4]:
        """Weights, tables, caches and inputs by value name."""
        return self.given or tensors(self.plan.graph, self.symbols, self.theta, "cuda", self.seed)

    @cached_property
    def step(self) -> DeviceStep:
        """The plan in device memory, its inputs set to the last position of each sequence."""
        step = DeviceStep(self.plan, self.compiled, self.tensors, self.symbols, BATCHES)
        self.set_rows(0)
        return step

    @cached_property
    def _apart(self) -> DeviceStep:
        """The same step with no two activations in one place, run once: any of its launches may be run again alone.

        Where they share memory, what a launch reads is gone once others have run: the experts it was to fetch, for one.
        """
        values = self.plan.graph.values
        buffers = {name: Buffer(name, (values[name].type,)) for name in self.plan.placement}
        plan = replace(self.plan, buffers=buffers, placement={name: name for name in buffers})
        step = DeviceStep(plan, self.compiled, self.tensors, self.symbols, BATCHES)
        self.set_rows(0)
        step.run(self.batch)
        return step

    def set_rows(self, repeat: int) -> None:
        """Random tokens at the last position of each of the sequences; ``repeat`` chooses the tokens."""
        embed = next(op for op in self.plan.graph.ops.values() if op.kind == "embed")
        vocab = self.plan.graph.values[embed.inputs[1]].type.shape[0]
        assert isinstance(vocab, int)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + repeat)
        ids = torch.randint(0, vocab, (self.rows,), generator=generator, dtype=torch.int32)
        self._input("ids")[: self.rows] = ids.cuda()
        self._input("positions")[: self.rows] = self.context - 1
        self._input("seqs")[: self.rows] = torch.arange(self.rows, dtype=torch.int32).cuda()
        self._input("seqs")[self.rows :] = -1

    def _input(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def batch(self) -> int:
        """Rows of the captured step: those of the sequences, padded up."""
        return next(b for b in BATCHES if b >= self.rows)

    def time(self, repeats: int = 50, part: Part = "logits") -> Timing:
        """Graph replays of ``part`` of the step, other tokens each time."""
        return time_device(self.step.graph(self.batch, part).replay, repeats, self.set_rows)

    def time_chain(self, kernel: str, repeats: int = 20, tokens: int | None = None) -> float:
        """Microseconds of one launch of ``kernel`` among its own: all the step's launches of it in a graph, in order.

        Each has its own weights, and starts early as in the step. tokens: of a sequence, in place of the context.
        Weights that fit the L2 cache all together are read from there.
        """
        chain = self._chain(lambda planned: planned.kernel == kernel)
        return self._time_in_chain(chain, repeats, tokens) / len(chain)

    def time_layers(self, layers: Sequence[int], times: int = 1, repeats: int = 20) -> float:
        """Microseconds of a layer, in a chain of these layers one after the other, ``times`` over."""
        names = {launch.name for n in layers for launch in self.plan.graph.layer_launches(n)}
        chain = self._chain(lambda planned: planned.name in names)
        return self._time_in_chain(chain * times, repeats) / (len(layers) * times)

    def _chain(self, wanted: Callable[[PlannedLaunch], bool]) -> list[PreparedLaunch]:
        """The step's launches that are ``wanted``, in order, to be run without the others."""
        prepared = self._apart.launches(self.batch)
        return [p for p, planned in zip(prepared, self.plan.launches, strict=True) if wanted(planned)]

    def _time_in_chain(self, chain: list[PreparedLaunch], repeats: int, tokens: int | None = None) -> float:
        """Microseconds that ``chain`` takes where it follows itself."""
        self.set_rows(0)
        if tokens is not None:
            self._input("positions")[: self.rows] = tokens - 1
        return us_in_chain(lambda times: captured(chain * times, self._apart.device), repeats)

    def logits(self, steps: int) -> Tensor:
        """Logits of as many steps of other tokens: f32[steps * rows, vocab]."""
        name = self.plan.graph.outputs[0]
        made = []
        for i in range(steps):
            self.set_rows(i)
            self.step.replay(self.batch)
            made.append(self.step.value(name, self.batch)[: self.rows].clone())
        return torch.cat(made)

    def profile(self, part: Part = "logits") -> list[Event]:
        """Everything the GPU did in one replay of ``part``, as the profiler saw it, in order.

        A launch that starts early counts its wait too.
        """
        graph = self.step.graph(self.batch, part)
        self.set_rows(0)  # a step with the sampler, run before, has moved its rows on
        graph.replay()
        self.set_rows(0)
        events = device_events(graph.replay)
        return [Event(e.name, e.time_range.start, e.time_range.elapsed_us()) for e in events]

    def profiled_launches(self, part: Part = "logits") -> int:
        """Launches of one replay, counted by the profiler."""
        return len(self.profile(part))
