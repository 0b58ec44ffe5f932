"""From a model to a bundle: its graph through the passes, the plan and its proof, the kernels; kept in the cache."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from flintc.bundle import Bundle, Origin, build_bundle, load_bundle, write_bundle
from flintc.codegen.cache import cache_root, package_digest
from flintc.errors import BundleError, FlintcWarning
from flintc.ir.build import Weights, build
from flintc.ir.graph import Graph
from flintc.ir.lower import lower_attention
from flintc.spec import BoundModel

if TYPE_CHECKING:
    from flintc.codegen.aot import Progress
    from flintc.passes import PipelineRun

#: The first release whose kernels keep weights in registers: those of 3.6 take twice as long (docs/benchmarks.md).
_FAST_TRITON = (3, 7)


def unfused(model: BoundModel, weights: Weights) -> Graph:
    """The graph of ``model`` before any pass: each op a launch of its own."""
    numerics = model.spec.numerics
    return lower_attention(
        build(model, weights), numerics.attention_chunk, numerics.window_chunk, numerics.attention_partials
    )


def fused(
    model: BoundModel, weights: Weights, disable_passes: Sequence[str] = (), stop_after: str | None = None
) -> PipelineRun:
    """The graph of ``model`` after every pass of its spec's pipeline (but for those disabled)."""
    from flintc.passes import run_pipeline  # here, with networkx: a bundle that is only read needs neither

    return run_pipeline(unfused(model, weights), model.spec.pipeline, disable_passes, stop_after)


@dataclass(frozen=True)
class Recipe:
    """What a bundle is made of: with this package and its compiler, all that it depends on.

    batches: rows that are captured, in ascending order. disabled: passes of the spec's pipeline that do not run.
    """

    model: BoundModel
    weights: Weights
    targets: tuple[str, ...]
    batches: tuple[int, ...]
    disabled: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the bundle in the cache: a hash of all that it depends on."""
        from flintc.codegen.schedule import tried

        model = self.model
        sets = {name: sorted(members) for name, members in model.layer_sets.items()}
        bound = [model.spec.sha256, dict(model.dims), dict(model.numbers), sets]
        asked = [self.weights, sorted(self.targets), self.batches, sorted(self.disabled), repr(tried())]
        made_by = [package_digest(), *map(version, ("flintc", "triton", "jinja2"))]
        return hashlib.sha256(json.dumps([bound, asked, made_by], sort_keys=True).encode()).hexdigest()[:32]

    @property
    def folder(self) -> Path:
        """Where the cache keeps the bundle."""
        return cache_root() / "bundles" / self.key

    def bundle(self, progress: Progress | None = None, *, must_keep: bool = False) -> Bundle:
        """The bundle, from the cache, or made and kept there.

        Where it cannot be kept, it has no path and there is a warning, or BundleError if it ``must_keep``. Raises
        PassError, CompileError, and VerificationError where the plan is not proved safe.
        """
        folder = self.folder  # named by the package's text of now, whatever it is once the bundle is made
        try:
            return load_bundle(folder)
        except BundleError:  # not there yet, or damaged
            made = self._make(progress)
        try:
            return write_bundle(made, folder)
        except BundleError as error:
            if must_keep:
                raise
            warnings.warn(f"the compiled bundle is used, but not kept: {error}", FlintcWarning, stacklevel=3)
            return made

    def _make(self, progress: Progress | None) -> Bundle:
        """The bundle, proved and compiled, in memory."""
        _warn_of_slow_kernels()
        from flintc.codegen.aot import compile_kernels
        from flintc.codegen.general import with_general
        from flintc.codegen.lint import check_compiled
        from flintc.codegen.planner import plan
        from flintc.codegen.sampler import with_sampler
        from flintc.safety import check_plan

        made = with_general(with_sampler(plan(fused(self.model, self.weights, self.disabled).graph)))
        check_plan(made)
        compiled = compile_kernels(made.all_kernels.values(), self.targets, progress=progress)
        step = [c for c in compiled.values() if c.kernel in made.kernels]
        check_compiled(made.kernels, step, machine_code=False)
        spec = self.model.spec
        pipeline = tuple(name for name in spec.pipeline if name not in self.disabled)
        return build_bundle(made, compiled, Origin(spec.name, spec.sha256, self.weights, pipeline, self.batches))


def _warn_of_slow_kernels() -> None:
    compiler = version("triton")
    if tuple(map(int, re.findall(r"\d+", compiler)[:2])) < _FAST_TRITON:
        message = f"Triton {compiler} makes kernels that take about twice as long as those of Triton 3.7"
        remedy = "compile the bundle where Triton 3.7 is installed (no GPU is needed there), and carry it here"
        warnings.warn(f"{message}; {remedy}", FlintcWarning, stacklevel=5)
