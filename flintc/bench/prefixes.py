"""Every prefix of a pipeline built, run and timed at full size on the GPU: the measured ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flintc import api
from flintc.bench.ablation import Ablation
from flintc.bench.ceiling import read_ceiling
from flintc.bench.divergence import kl
from flintc.bench.forward import ForwardBench
from flintc.bundle import Bundle, load_bundle
from flintc.errors import BackendError, UsageError, VerificationError
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

    Each runs in a process of its own, on the same weights, caches and inputs: the more kernels and graphs a process has
    loaded before, the longer are the gaps between the launches of the next. bundles: a folder of bundles made ahead,
    one per prefix, found by their pipeline; what is not there is compiled here. VerificationError where the profiler
    counts other launches than the plan. BackendError without a GPU.
    """
    target = api.gpu_target()
    if target is None:
        raise BackendError("measuring needs a GPU of a target", remedy="leave --measure away for the derived figures")
    names = [step.name for step in ablation.steps]
    ahead = _find_bundles(bundles)
    ceiling = read_ceiling()
    found: dict[str, Measured] = {}
    with TemporaryDirectory(prefix="flintc-ablate-") as scratch:
        for done, name in enumerate(names):
            if progress is not None:
                progress(done, len(names), name)
            bundle = _bundle(model, ablation, names[1 : done + 1], ahead, target)
            subject = _Subject(bundle, target, ablation.context, ablation.batch, model.numbers.get("rope_theta", 1e4))
            found[name] = _in_a_process(subject, repeats, Path(scratch) / "baseline.pt")
            if found[name].launches != ablation.steps[done].launches:
                raise VerificationError(
                    f"{name}: the profiler counts {found[name].launches} launches, "
                    f"the plan has {ablation.steps[done].launches}"
                )
    return ceiling, found


@dataclass(frozen=True, slots=True)
class _Subject:
    bundle: Bundle
    target: str
    context: int
    batch: int
    theta: float


def _in_a_process(subject: _Subject, repeats: int, baseline: Path) -> Measured:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure, subject, repeats, baseline).result()


def _measure(subject: _Subject, repeats: int, baseline: Path) -> Measured:
    """Figures of one prefix; the first writes the logits that the others are compared with to ``baseline``."""
    compiled = subject.bundle.for_target(subject.target)
    bench = ForwardBench(subject.bundle.plan, compiled, subject.context, subject.batch, subject.theta)
    logits = bench.logits(COMPARED)
    if not baseline.exists():
        torch.save(logits, baseline)
    timing = bench.time(repeats, "body")
    divergence = float(kl(torch.load(baseline, map_location=logits.device), logits).mean())
    return Measured(timing.median / 1e3, timing.percentile(99) / 1e3, bench.profiled_launches("body"), divergence)


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
    key = (ablation.spec, ablation.weights, tuple(passes))
    if key in ahead:
        return load_bundle(ahead[key])
    left_out = [name for name in model.spec.pipeline if name not in passes]
    return api.compile(model, weights=ablation.weights, target=target, disable_passes=left_out)
