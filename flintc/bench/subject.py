"""A checkpoint opened for verification: its graph after any pass, its weights, and what can run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flintc import api
from flintc.bench.runners import CudaRunner, InterpretRunner, ReferenceRunner, Runner
from flintc.errors import TokenizerError, UsageError
from flintc.ir.build import unfused
from flintc.ir.graph import Graph
from flintc.ir.plan import CompiledKernel, Plan
from flintc.reference import Nvfp4
from flintc.runtime.executor import Executor, forward
from flintc.runtime.tokenizer import Tokenizer
from flintc.spec import BoundModel

if TYPE_CHECKING:
    from flintc.bundle import Bundle
    from flintc.runtime.cuda.executor import CudaExecutor

BACKENDS = ("reference", "interpret", "cuda")


@dataclass
class Subject:
    """What is verified.

    weights: by value name, on the GPU where there is one that kernels are compiled for. tokenizer: or why there is
    none. bundle: given by the user; its partition is then what runs. config: folder with a config.json in place of the
    checkpoint's own. disabled: passes left out of the pipeline.
    """

    path: Path
    model: BoundModel
    format: str
    weights: Mapping[str, Tensor | Nvfp4]
    tokenizer: Tokenizer | TokenizerError
    bundle: Bundle | None = None
    config: Path | None = None
    disabled: tuple[str, ...] = ()
    _moved: dict[str, Mapping[str, Tensor | Nvfp4]] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> str:
        """Where the weights are."""
        return next(iter(self.weights.values())).device.type

    def graph(self, after: str | None = None) -> Graph:
        """The graph after the pass ``after`` (default: all of the pipeline, or the bundle's).

        With a bundle it is made of the bundle's ops, whose pages and chunks may be other than the spec's.
        """
        from flintc.passes import run_pipeline

        if self.bundle is None:
            return api.run_passes(self.model, self.format, self.disabled, after).graph
        whole = self.bundle.plan.graph
        if after is None:
            return whole
        return run_pipeline(unfused(whole), self.model.spec.pipeline, self.disabled, after).graph

    def plan(self, after: str | None = None) -> Plan:
        """Its kernels, rendered by this installation: nothing that a bundle holds as source is executed."""
        from flintc.codegen.planner import plan

        return plan(self.graph(after))

    @property
    def vocab(self) -> int:
        """Rows of the head."""
        graph = self.graph("baseline")
        vocab = graph.values[graph.outputs[0]].type.shape[-1]
        assert isinstance(vocab, int)
        return vocab

    def weights_on(self, device: str) -> Mapping[str, Tensor | Nvfp4]:
        """The weights on ``cpu`` or ``cuda``: one copy per device, since a full model leaves no room for another."""
        if device not in self._moved:
            self._moved[device] = self.weights if device == self.device else on_device(self.weights, device)
        return self._moved[device]

    def tables(self, graph: Graph, positions: int, device: str = "cpu") -> dict[str, Tensor]:
        """Constant tables of ``graph`` for so many positions."""
        from flintc.runtime.storage import make_tables

        return make_tables(graph, self.model, positions, device)

    def runner(self, backend: str, after: str | None = None) -> Runner:
        """What runs single launches of the graph after the pass ``after``."""
        check_backend(backend)
        if backend == "reference":
            return ReferenceRunner(self.graph(after), self.device)
        if backend == "interpret":
            return InterpretRunner(self.plan(after))
        return CudaRunner(*self._compiled(after))

    def executor(self, backend: str, context: int, after: str | None = None) -> Executor:
        """What runs whole steps, for one sequence of up to ``context`` tokens; ``after`` as for :meth:`graph`."""
        check_backend(backend)
        if backend == "cuda":
            return self._cuda_executor(after, context)
        if backend == "interpret":
            from flintc.runtime.interpret_executor import InterpretExecutor

            plan = self.plan(after)
            weights, tables = self.weights_on("cpu"), self.tables(plan.graph, context)
            return InterpretExecutor(plan, weights, tables, context, slots=1)
        from flintc.runtime.reference_executor import ReferenceExecutor

        graph = self.graph("baseline")
        tables = self.tables(graph, context, self.device)
        return ReferenceExecutor(graph, self.weights, tables, "rounded", context, slots=1)

    def executors(self, backend: str, context: int) -> dict[str, Executor]:
        """Every way in which ``backend`` runs prompts of ``context`` tokens, by what it is called.

        By steps; and on a GPU in chunks too, where they are long enough for that.
        """
        steps = self.executor(backend, context)
        found = {steps.path: steps}
        if backend == "cuda":
            chunks = self._cuda_executor(None, context, chunks=True)
            if chunks.takes(context):
                found[chunks.prompt_path] = chunks
        return found

    def logits(self, backend: str, prompts: Sequence[Sequence[int]], after: str | None = None) -> list[Tensor]:
        """Logits after each token of each prompt: f32[T, vocab] on the CPU."""
        return run_prompts(self.executor(backend, max(map(len, prompts)), after), prompts)

    def _cuda_executor(self, after: str | None, context: int, *, chunks: bool = False) -> CudaExecutor:
        from flintc.runtime.cuda.executor import CudaExecutor

        plan, compiled = self._compiled(after, chunks=chunks)
        weights, tables = self.weights_on("cuda"), self.tables(plan.graph, context, "cuda")
        return CudaExecutor(plan, compiled, weights, tables, context, slots=1)

    def _compiled(self, after: str | None, *, chunks: bool = False) -> tuple[Plan, Mapping[str, CompiledKernel]]:
        """A plan and its machine code for the GPU that is here; the bundle's where there is one.

        chunks: with the general path, on which long prompts run; else it is left out.
        """
        target = api.gpu_target()
        assert target is not None
        if after is None and self.bundle is not None:
            plan = self.bundle.plan if chunks else replace(self.bundle.plan, general=None)
            return plan, self.bundle.for_target(target)
        from flintc.codegen.aot import compile_kernels
        from flintc.codegen.general import with_general

        plan = with_general(self.plan(after)) if chunks else self.plan(after)
        made = compile_kernels(plan.all_kernels.values(), [target])
        return plan, {name: made[name, target] for name in plan.all_kernels}


def check_backend(backend: str) -> None:
    """UsageError for a backend that does not exist, BackendError for one that cannot run here."""
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}", remedy=f"choose from {', '.join(BACKENDS)}")
    if backend == "cuda":
        api.check_gpu()


def run_prompts(executor: Executor, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each prompt in a slot of its own, one after the other: f32[T, vocab]."""
    made = []
    for ids in prompts:
        slot = executor.kv.add(len(ids))
        made.append(forward(executor, slot, ids))
        executor.kv.finish(slot)
    return made


def on_device(values: Mapping[str, Tensor | Nvfp4], device: str) -> dict[str, Tensor | Nvfp4]:
    """The same values on ``device``."""
    return {name: value.to(device) for name, value in values.items()}


def open_subject(
    path: str | Path,
    *,
    bundle: str | Path | None = None,
    spec: str | Path | None = None,
    config: Path | None = None,
    tokenizer: Path | None = None,
) -> Subject:
    """Open a checkpoint, read its weights, and check a bundle against it. Errors as for :func:`flintc.load`."""
    from flintc.bundle import check_same_model
    from flintc.checkpoint import open_checkpoint
    from flintc.runtime.hub import find_checkpoint, find_companion
    from flintc.runtime.loading import find_tokenizer
    from flintc.spec import load_spec, spec_for

    config, tokenizer = (None if given is None else find_companion(given) for given in (config, tokenizer))
    checkpoint = open_checkpoint(find_checkpoint(path), config)
    match = checkpoint.spec_match
    built = api.open_bundle(bundle)
    chosen = load_spec(spec) if spec is not None else spec_for(match.architecture, match.gguf)
    model = checkpoint.bind(chosen)
    graph = api.run_passes(model, checkpoint.weights_format, stop_after="baseline").graph
    if built is not None:
        check_same_model(built, graph, checkpoint.weights_format)
    weights = checkpoint.load(graph, model, "cuda" if api.gpu_target() else "cpu")
    text = find_tokenizer(checkpoint, tokenizer, config)
    return Subject(checkpoint.path, model, checkpoint.weights_format, weights, text, built, config)


def default_backend(otherwise: str = "reference") -> str:
    """``cuda`` where there is a GPU that kernels are compiled for, else ``otherwise``."""
    return "cuda" if api.gpu_target() else otherwise
