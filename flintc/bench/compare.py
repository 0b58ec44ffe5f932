"""What ``flintc bench compare`` measures: the same BF16 decode step in transformers and in flintc, on one GPU.

Every row is measured in a process of its own, so that none pays for what another left behind, and each has the whole of
the GPU's memory. A step is of one token that follows ``context`` cached ones, all layers and the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flintc.bench.apart import run_apart
from flintc.bench.built import bundle_for, gpu_here, rope_base
from flintc.bench.ceiling import read_ceiling
from flintc.bench.forward import ForwardBench, check_launches
from flintc.bench.timing import StepFigures
from flintc.bundle import Bundle, load_bundle
from flintc.checkpoint.config_json import published_config
from flintc.errors import BackendError, FlintcError, MeasurementError, UsageError
from flintc.ir.cost import decode_env, graph_cost
from flintc.spec import BoundModel, bind_defaults, load_spec

#: Called with (rows done, rows in all, what is being done).
Progress = Callable[[int, int, str], None]
_WEIGHTS = "bf16"
#: Seconds that the row of torch.compile may take where nothing else is said.
COMPILE_LIMIT = 300.0
EAGER, COMPILED = "transformers, eager", "transformers, torch.compile"
UNFUSED, FUSED = "flintc, unfused", "flintc, fused"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the step; without ``figures``, ``failure`` says why."""

    name: str
    figures: StepFigures | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything measured in one run. context: cached tokens. ceiling: bytes per second of a plain read."""

    spec: str
    context: int
    gpu: str
    ceiling: float
    versions: Mapping[str, str]
    rows: tuple[Row, ...]

    def rate(self, row: Row) -> float | None:
        """Bytes per second, where the row's bytes are known."""
        if row.figures is None or row.figures.nbytes is None:
            return None
        return row.figures.nbytes / (row.figures.ms / 1e3)

    def share(self, row: Row) -> float | None:
        """:meth:`rate` over the read ceiling."""
        rate = self.rate(row)
        return None if rate is None else rate / self.ceiling

    def ratio(self, row: Row) -> float | None:
        """Time of the row over that of flintc's fused step."""
        fused = next(r.figures for r in self.rows if r.name == FUSED)
        return None if row.figures is None or fused is None else row.figures.ms / fused.ms

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench compare --json`` prints."""
        return {
            "spec": self.spec, "weights": _WEIGHTS, "context": self.context, "batch": 1, "gpu": self.gpu,
            "read_ceiling_bytes_per_second": self.ceiling, "versions": dict(self.versions),
            "rows": [self._row_json(row) for row in self.rows],
        }  # fmt: skip

    def _row_json(self, row: Row) -> dict[str, Any]:
        f = row.figures
        return {
            "name": row.name, "ms": f and f.ms, "launches": f and f.launches, "bytes": f and f.nbytes,
            "bytes_per_second": self.rate(row), "share_of_ceiling": self.share(row), "times_fused": self.ratio(row),
            "how": f.how if f else None, "failure": row.failure or None,
        }  # fmt: skip


def measure_comparison(
    spec: str,
    bundle: Path | None,
    baseline_bundle: Path | None,
    context: int,
    repeats: int,
    compile_limit: float | None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure a step of ``spec`` at its default sizes after ``context`` tokens, in transformers and in flintc.

    bundle, baseline_bundle: folders with all passes and with none; what is None is compiled here. repeats: timed steps
    of transformers; flintc's, which take milliseconds, are as many as elsewhere. compile_limit: seconds that the row of
    ``torch.compile`` may take; None leaves it out. Whatever goes wrong in that row is its text.
    BackendError without transformers or a GPU, UsageError and BundleError where a bundle is not for this comparison,
    MeasurementError where another row fails.
    """
    theirs = _transformers_side()
    model = bind_defaults(load_spec(spec))
    if not theirs.ARCHITECTURES.intersection(model.spec.match.architectures):
        known = ", ".join(sorted(theirs.ARCHITECTURES))
        raise UsageError(f"{model.spec.name} is not a model that transformers has", remedy=f"compare a {known}")
    target = gpu_here("comparing")
    passes = model.spec.pipeline
    fused = checked(bundle_for(model, _WEIGHTS, bundle, target), model, target, passes)
    unfused = checked(bundle_for(model, _WEIGHTS, baseline_bundle, target, passes), model, target, ())
    ahead = dict(published_config(model)), context, repeats
    here = target, context + 1, rope_base(model)
    calls: dict[str, tuple[Callable[..., StepFigures], tuple[Any, ...]]] = {
        EAGER: (theirs.measure_transformers, (*ahead, False)),
        COMPILED: (theirs.measure_transformers, (*ahead, True)),
        UNFUSED: (measure_bundle, (unfused.path, *here)),
        FUSED: (measure_bundle, (fused.path, *here)),
    }
    if compile_limit is None:
        del calls[COMPILED]
    rows = []
    for done, (name, (call, args)) in enumerate(calls.items()):
        if progress is not None:
            progress(done, len(calls), name)
        rows.append(_row(name, call, args, compile_limit))
    ceiling = run_apart(read_ceiling)
    return Comparison(model.spec.name, context, torch.cuda.get_device_name(), ceiling, _versions(fused), tuple(rows))


def _row(name: str, call: Callable[..., StepFigures], args: Sequence[Any], limit: float | None) -> Row:
    compiled = name == COMPILED
    try:
        return Row(name, run_apart(call, *args, limit=limit if compiled else None))
    except FlintcError as error:
        if compiled:
            return Row(name, None, error.message)
        if isinstance(error, MeasurementError):
            raise MeasurementError(f"{name}: {error.message}") from error
        raise


def measure_bundle(path: Path, target: str, context: int, theta: float) -> StepFigures:
    """Time a bundle's step of one row that attends to ``context`` tokens, its own included.

    VerificationError where the profiler counts other launches than the plan.
    """
    bundle = load_bundle(path)
    graph = bundle.plan.graph
    bench = ForwardBench(bundle.plan, bundle.for_target(target), context, theta=theta)
    timing = bench.time(part="body")
    launches = bench.profiled_launches("body")
    check_launches(str(path), launches, len(graph.body))
    nbytes = graph_cost(graph, decode_env(graph, context), graph.body).bytes
    return StepFigures(timing.median, launches, nbytes, f"Triton {bundle.manifest.versions['triton']}")


def checked(bundle: Bundle, model: BoundModel, target: str, passes: Sequence[str]) -> Bundle:
    """``bundle``; UsageError or BundleError unless it is for ``target`` and after ``passes`` and no others."""
    name = model.spec.name
    asked = f"after {', '.join(passes)}" if passes else "after no pass"
    if bundle.manifest.pipeline != tuple(passes):
        has = ", ".join(bundle.manifest.pipeline) or "no pass"
        raise UsageError(f"the bundle {bundle.path} is compiled after {has}: here {name} is compared {asked}")
    bundle.for_target(target)
    return bundle


def _transformers_side() -> ModuleType:
    try:
        from flintc.bench import transformers_step
    except ImportError as error:
        remedy = "pip install 'flintc[verify]'"
        raise BackendError(f"comparing needs transformers 5.24: {error}", remedy=remedy) from error
    return transformers_step


def _versions(bundle: Bundle) -> dict[str, str]:
    """Of what ran: packages of this process, and the Triton that compiled the bundle."""
    import transformers

    triton = bundle.manifest.versions["triton"]
    return {"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton}
