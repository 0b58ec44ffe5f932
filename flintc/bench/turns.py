"""Bundles of one model timed in turn: what a change of kernels is worth, free of what differs between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flintc.bench.built import gpu_here
from flintc.bench.ceiling import read_ceiling
from flintc.bench.divergence import kl
from flintc.bench.forward import ForwardBench
from flintc.bundle import Bundle, first_difference, load_bundle
from flintc.errors import UsageError

#: Steps, of other tokens each, whose logits are compared.
COMPARED = 4


@dataclass(frozen=True, slots=True)
class Side:
    """One bundle: milliseconds of a step (all layers and the final norm), and its logits beside the first bundle's.

    rounds: the median of each turn. equal: the logits have the first bundle's bits; kl: largest divergence from it, in
    nats. alone_us: microseconds of a launch of a kernel in a chain of its own launches, where it was asked for.
    """

    bundle: str
    launches: int
    rounds: tuple[float, ...]
    equal: bool
    kl: float
    alone_us: Mapping[str, float]

    @property
    def ms(self) -> float:
        """The middle turn."""
        return median(self.rounds)


@dataclass(frozen=True, slots=True)
class Turns:
    """What was measured in one run. ceiling: bytes per second of a plain read."""

    spec: str
    weights: str
    context: int
    batch: int
    gpu: str
    ceiling: float
    sides: tuple[Side, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench bundles --json`` prints."""
        return asdict(self) | {"sides": [asdict(side) | {"ms": side.ms} for side in self.sides]}


def open_sides(folders: Sequence[Path]) -> list[Bundle]:
    """The bundles in ``folders``; BundleError where one is none, UsageError for fewer than two, or of two models."""
    if len(folders) < 2:
        raise UsageError("one bundle has nothing to be timed against", remedy="name two or more")
    first, *others = map(load_bundle, folders)
    for other in others:
        difference = first_difference(first.plan.graph, other.plan.graph, memory=True)
        if difference is not None:
            name, one, two = difference
            message = f"the bundles {first.path} and {other.path} are of two models"
            remedy = "name bundles of one spec, of the same sizes and weight format"
            raise UsageError(f"{message}: {name} is {one} in the first, {two} in the other", remedy=remedy)
    return [first, *others]


def measure_turns(
    folders: Sequence[Path], context: int, batch: int, repeats: int, rounds: int, kernels: Sequence[str]
) -> Turns:
    """Time the bundles in ``folders`` one after the other, ``rounds`` times over, on the same tensors.

    context, batch: tokens of a sequence, and sequences. repeats: graph replays of a turn. kernels: beginnings of the
    names of kernels to be timed alone. Raises what :func:`open_sides` does, and BackendError without a GPU.
    """
    bundles = open_sides(folders)
    names = {launch.kernel for bundle in bundles for launch in bundle.plan.launches}
    if unknown := [prefix for prefix in kernels if not any(name.startswith(prefix) for name in names)]:
        raise UsageError(f"no kernel is called {unknown[0]}", remedy=f"kernels: {', '.join(sorted(names))}")
    target = gpu_here()
    benches = [ForwardBench(bundles[0].plan, bundles[0].for_target(target), context, batch)]
    for bundle in bundles[1:]:
        benches.append(ForwardBench(bundle.plan, bundle.for_target(target), context, batch, given=benches[0].tensors))
    logits = [bench.logits(COMPARED) for bench in benches]
    turns = [[bench.time(repeats, "body").median for bench in benches] for _ in range(rounds)]
    sides = [
        Side(
            str(folder), len(bench.plan.launches), tuple(turn[n] for turn in turns),
            torch.equal(logits[n], logits[0]), float(kl(logits[0], logits[n]).max()), _alone(bench, kernels),
        )
        for n, (folder, bench) in enumerate(zip(folders, benches, strict=True))
    ]  # fmt: skip
    graph, weights = bundles[0].plan.graph, bundles[0].manifest.weights
    return Turns(graph.name, weights, context, batch, torch.cuda.get_device_name(), read_ceiling(), tuple(sides))


def _alone(bench: ForwardBench, kernels: Sequence[str]) -> dict[str, float]:
    names = dict.fromkeys(launch.kernel for launch in bench.plan.launches)
    return {name: bench.time_chain(name) for name in names if name.startswith(tuple(kernels))}
