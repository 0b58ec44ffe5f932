"""Every prefix of a pipeline built, run and timed at full size on the GPU: the measured ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flintc.bench.ablation import Ablation
from flintc.bench.apart import run_apart
from flintc.bench.built import bundle_for, gpu_here, rope_base
from flintc.bench.ceiling import read_ceiling
from flintc.bench.divergence import kl
from flintc.bench.forward import ForwardBench, check_launches
from flintc.bench.timing import Timing
from flintc.bundle import Bundle, load_bundle
from flintc.errors import UsageError
from flintc.spec import BoundModel

Progress = Callable[[int, int, str], None]
#: Steps of random tokens whose logits are compared between prefixes.
COMPARED = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one prefix. seconds: median of a forward without the head. launches: as the profiler counted them.

    kl_baseline: mean KL, in nats, of the next-token distribution from that of the unfused kernels.
    """

    seconds: float
    p99_seconds: float
    launches: int
    kl_baseline: float


def measure_prefixes(
    model: BoundModel,
    ablation: Ablation,
    *,
    bundles: Path | None = None,
    repeats: int = 50,
    progress: Progress | None = None,
) -> tuple[float, dict[str, Measured]]:
    """Run each step of ``ablation`` with synthetic weights; returns the read ceiling in bytes/s, and figures by step.

    Each prefix has a process of its own, and in it the same weights, caches and inputs, drawn from one seed: of several
    bundles that one process runs, the first has 0.2 us less between any two launches than the others. bundles: a folder
    of bundles made ahead, one per prefix, found by their pipeline; what is not there is compiled here.
    VerificationError where the profiler counts other launches than the plan. BackendError without a GPU.
    """
    target = gpu_here("measuring", remedy="leave --measure away for the derived figures")
    names = [step.name for step in ablation.steps]
    ahead = _find_bundles(bundles)
    built = {name: _bundle(model, ablation, names[1 : done + 1], ahead, target) for done, name in enumerate(names)}
    ceiling = run_apart(read_ceiling)
    baseline: Tensor | None = None
    found: dict[str, Measured] = {}
    for done, step in enumerate(ablation.steps):
        if progress is not None:
            progress(done, len(names), step.name)
        given = built[step.name], target, ablation.context, ablation.batch, rope_base(model), repeats
        timing, logits, launches = run_apart(_measure, *given)
        baseline = logits if baseline is None else baseline
        check_launches(step.name, launches, step.launches)
        divergence = float(kl(baseline, logits).mean())
        found[step.name] = Measured(timing.median / 1e3, timing.percentile(99) / 1e3, launches, divergence)
    return ceiling, found


def _measure(
    bundle: Bundle, target: str, context: int, batch: int, theta: float, repeats: int
) -> tuple[Timing, Tensor, int]:
    """Times of a forward without the head; logits of COMPARED steps; launches by the profiler, which comes last.

    A process that the profiler has looked at has 0.4 us more between any two launches from then on.
    """
    bench = ForwardBench(bundle.plan, bundle.for_target(target), context, batch, theta)
    timing = bench.time(repeats, "body")
    return timing, bench.logits(COMPARED).cpu(), bench.profiled_launches("body")


def with_measurements(ablation: Ablation, ceiling: float, found: Mapping[str, Measured]) -> Ablation:
    """``ablation`` with times, profiled launches, divergences and the ceiling filled in."""
    for name, m in found.items():
        ablation = ablation.measured(
            name, seconds=m.seconds, p99_seconds=m.p99_seconds, launches_profiled=m.launches, kl_baseline=m.kl_baseline
        )
    return ablation.beside(ceiling)


def _find_bundles(folder: Path | None) -> dict[tuple[str, str, tuple[str, ...]], Path]:
    """Bundles below ``folder`` by spec, weights and pipeline."""
    if folder is None:
        return {}
    paths = sorted(p.parent for p in folder.glob("*/manifest.json"))
    if not paths:
        raise UsageError(
            f"{folder} holds no bundles", remedy="make one per prefix with `flintc compile --disable-pass`"
        )
    manifests = [(load_bundle(p).manifest, p) for p in paths]
    return {(m.spec, m.weights, tuple(m.pipeline)): p for m, p in manifests}


def _bundle(
    model: BoundModel,
    ablation: Ablation,
    passes: Sequence[str],
    ahead: Mapping[tuple[str, str, tuple[str, ...]], Path],
    target: str,
) -> Bundle:
    made = ahead.get((ablation.spec, ablation.weights, tuple(passes)))
    left_out = [name for name in model.spec.pipeline if name not in passes]
    return bundle_for(model, ablation.weights, made, target, left_out)
