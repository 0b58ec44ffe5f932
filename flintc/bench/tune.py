"""``flintc tune``: layouts of the products' kernels, tried one after the other on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import torch
import yaml

from flintc import api
from flintc.bench.built import bundle_for, gpu_here, rope_base
from flintc.bench.forward import ForwardBench
from flintc.bundle import Bundle
from flintc.codegen.cache import write_atomically
from flintc.codegen.schedule import Schedule, trying
from flintc.errors import UsageError
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel

Progress = Callable[[int, int, str], None]

#: Kernels whose layout is a choice, by the beginning of their names.
TUNED = ("qkv_", "linear_", "gate_up_", "expert_")

#: What is tried, beside the rules.
CANDIDATES = {f"w{w}r{r}": Schedule(w, r) for w, r in product((2, 4, 8), (0, 64, 80, 112, 128, 152, 168))}

#: A layout is kept if it beats the rules' by this share: less is noise.
MARGIN = 0.03


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel with one layout: microseconds of a launch in a chain of its own, at one row and at eight.

    warps: of a program. registers: most of a thread, 0 for no limit.
    """

    candidate: str
    warps: int
    registers: int
    us: float
    us_of_eight: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """A kernel's trials; ``rules`` is what it takes by the rules. triton: the version that compiled it."""

    kernel: str
    triton: str
    rules: Trial
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The quickest trial at one row; the rules' unless another is quicker by MARGIN and eight rows do not pay."""
        most = self.rules.us_of_eight * (1 + MARGIN)
        fair = [t for t in self.trials if self._quickest_of_eight(t).us_of_eight <= most]
        quickest = min(fair, key=lambda t: t.us, default=self.rules)
        return quickest if quickest.us < self.rules.us * (1 - MARGIN) else self.rules

    @property
    def best_of_eight(self) -> Trial:
        """The quickest at eight rows that gives the bits of :attr:`best`; that one itself unless it gains by MARGIN."""
        quickest = self._quickest_of_eight(self.best)
        return quickest if quickest.us_of_eight < self.best.us_of_eight * (1 - MARGIN) else self.best

    def _quickest_of_eight(self, like: Trial) -> Trial:
        """Among those with as many warps: warps share a sum, so that their number is part of its order."""
        alike = [t for t in (self.rules, *self.trials) if t.warps == like.warps]
        return min(alike, key=lambda t: t.us_of_eight)


def candidates_called(names: Sequence[str]) -> tuple[str, ...]:
    """The candidates among ``names``, all where there are none; UsageError for another name."""
    unknown = [name for name in names if name not in CANDIDATES]
    if unknown:
        raise UsageError(f"no candidate is called {unknown[0]}", remedy=f"choose from {', '.join(CANDIDATES)}")
    return tuple(names) or tuple(CANDIDATES)


def prepare(
    model: BoundModel,
    weights: str,
    target: str,
    folder: Path,
    candidates: Sequence[str] = (),
    progress: Progress | None = None,
) -> None:
    """Compile a bundle per candidate, and one by the rules, below ``folder``; needs no GPU."""
    names = ["rules", *candidates_called(candidates)]
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), name)
        with trying(CANDIDATES.get(name, Schedule())):
            api.compile(model, weights=weights, target=target, out=folder / name)


def tune(
    model: BoundModel,
    weights: str,
    context: int,
    prepared: Path | None = None,
    candidates: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[Tuned, ...]:
    """Time every candidate, or those named, of every tuned kernel on this GPU, with synthetic weights.

    prepared: a folder that :func:`prepare` filled; what it lacks is compiled here. BackendError without a GPU,
    UsageError where there is no such folder, or it holds other weights.
    """
    names = ["rules", *candidates_called(candidates)]
    if prepared is not None and not prepared.is_dir():
        raise UsageError(f"{prepared}: no such folder", remedy="`flintc tune --prepare` makes one")
    target = gpu_here("tuning")
    given: Mapping[str, torch.Tensor | Nvfp4] | None = None
    found: dict[str, dict[str, Trial]] = {}
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), name)
        made = prepared / name if prepared is not None and (prepared / name).exists() else None
        with trying(CANDIDATES.get(name, Schedule())):
            bundle = bundle_for(model, weights, made, target)
        compiled = bundle.for_target(target)
        theta = rope_base(model)
        eight = ForwardBench(bundle.plan, compiled, context, 8, theta, given=given)
        given = eight.tensors
        one = ForwardBench(bundle.plan, compiled, context, 1, theta, given=given)
        for kernel, launch in {x.kernel: x for x in bundle.plan.launches}.items():
            trials = found.setdefault(kernel, {})
            sound = all(compiled[bundle.plan.kernel_for(launch, rows).name].spills == 0 for rows in (1, 8))
            if kernel.startswith(TUNED) and sound and _is_new(bundle, kernel, name, trials):
                laid = bundle.plan.kernels[kernel]
                times = one.time_chain(kernel), eight.time_chain(kernel)
                trials[name] = Trial(name, laid.num_warps, laid.max_registers, *times)
    triton = bundle.manifest.versions["triton"]
    return tuple(
        Tuned(kernel, triton, trials["rules"], tuple(t for n, t in trials.items() if n != "rules"))
        for kernel, trials in found.items()
        if "rules" in trials
    )


def _is_new(bundle: Bundle, kernel: str, candidate: str, trials: Mapping[str, Trial]) -> bool:
    """Whether the kernel has the candidate's warps, and no trial before had its layout.

    ``expert_down`` has a warp per product, whatever it is told; a candidate may be what the rules say anyway.
    """
    warps, laid = CANDIDATES.get(candidate, Schedule()).warps, bundle.plan.kernels[kernel]
    tried = {(t.warps, t.registers) for t in trials.values()}
    return warps in (None, laid.num_warps) and (laid.num_warps, laid.max_registers) not in tried


def entries(tuned: tuple[Tuned, ...]) -> dict[str, dict[str, Any]]:
    """Entries of a schedule file for the kernels that gain, with the figures that chose them."""
    when = f"{date.today().isoformat()}, {torch.cuda.get_device_name()}"
    made: dict[str, dict[str, Any]] = {}
    for each in tuned:
        one, eight = each.best, each.best_of_eight
        if one is each.rules and eight is one:
            continue
        entry = made[each.kernel] = {"measured": f"{when}, Triton {each.triton}"}
        entry |= {"us": round(one.us, 2), "rules_us": round(each.rules.us, 2)}
        if one is not each.rules:
            entry |= {"warps": one.warps, "registers": one.registers}
        if eight is not one:
            entry |= {"several": eight.registers, "us_of_eight": round(eight.us_of_eight, 2)}
            entry["rules_us_of_eight"] = round(each.rules.us_of_eight, 2)
    return made


def read_entries(path: Path) -> dict[str, Any]:
    """The entries of a schedule file, none where there is no file; UsageError where it is none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        found = False
    if not isinstance(found, dict | None):
        raise UsageError(f"{path}: not a schedule file", remedy="name one that `flintc tune` wrote, or a new one")
    return found or {}


def write_entries(path: Path, made: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a schedule file, whole or not at all; what stands at its top, and its entries for other kernels, stay."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    top = "".join(takewhile(lambda line: line.startswith("#"), old.splitlines(keepends=True)))
    text = yaml.safe_dump({**read_entries(path), **made}, sort_keys=True, default_flow_style=None, width=120)
    write_atomically(path, (top + text).encode())
