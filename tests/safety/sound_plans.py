"""The sound plans that mutants are made from: of two short models, as every prefix of the pipeline leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path as File
from random import Random
from unittest.mock import patch

from graphs import baseline
from plan_programs import ROWS

from flintc.codegen import planner
from flintc.codegen.effects import effects_of
from flintc.ir.graph import Graph
from flintc.ir.plan import Param, Path, Plan
from flintc.passes import PASSES, Pass, run_pipeline
from flintc.passes.split_arrivals import SplitArrivals

SPECS = tuple(str(File(__file__).parents[1] / "data" / name) for name in ("short-flint.yaml", "short-other.yaml"))
CHAIN, CUT = "dependent-launch", "split-arrivals"
#: The passes that join launches: those before the chain.
JOINING = tuple(PASSES)[: list(PASSES).index(CHAIN)]
#: Leaves the launches of the short models' largest weights whole, as the pass itself leaves those of Flint's in BF16.
PARTLY = SplitArrivals(streams=16 << 10)

#: The kinds of plan: launches in turn; chained ones, in which last arrivers go on; chained ones, cut where these would.
KINDS_OF_PLAN = ("in turn", "joined", "cut")


@dataclass(frozen=True)
class Sound:
    """A sound plan of one kind, after ``joining`` passes that join launches."""

    plan: Plan
    kind: str
    spec: str
    joining: int


def planned(graph: Graph) -> Plan:
    """The plan of ``graph``. Most of its time goes into reading effects: those of one source are read once for all."""
    with patch.object(planner, "effects_of", _effects):
        return planner.plan(graph)


def _effects(source: str, entry: str, params: Sequence[Param], constants: Mapping[str, float]) -> tuple[Path, ...]:
    return _read(source, entry, tuple(params), tuple((name, type(x), x) for name, x in constants.items()))


@cache
def _read(
    source: str, entry: str, params: tuple[Param, ...], constants: tuple[tuple[str, type, float], ...]
) -> tuple[Path, ...]:
    return effects_of(source, entry, params, {name: x for name, _, x in constants})


@cache
def whole_plans() -> tuple[Sound, ...]:
    """Every prefix of the pipeline of two short models, in every kind, with the kernels for every number of rows."""
    made = []
    for spec in SPECS:
        for joining in range(len(JOINING) + 1):
            for kind, passes in _ways(joining):
                run = run_pipeline(baseline(spec), [*JOINING[:joining], *passes])
                if kind != "cut" or run.steps[-1].matched:
                    made.append(Sound(planned(run.graph), kind, spec, joining))
    return tuple(made)


def _ways(joining: int) -> Iterator[tuple[str, tuple[str | Pass, ...]]]:
    """Kinds of plan, and what makes them of what ``joining`` passes leave."""
    yield "in turn", ()
    yield "joined", (CHAIN,)
    yield "cut", (CHAIN, CUT)
    if joining == len(JOINING):
        yield "cut", (CHAIN, PARTLY)


def the_whole_of(spec: str, kind: str) -> Plan:
    """The plan of ``spec`` after all passes that its kind has."""
    return next(x.plan for x in whole_plans() if (x.spec, x.kind, x.joining) == (spec, kind, len(JOINING)))


def sound_plans(batch: int) -> tuple[Sound, ...]:
    """:func:`whole_plans` as ``batch`` rows run. The same objects for all batches of several rows."""
    return _one_row() if batch == 1 else _several_rows()


@cache
def _one_row() -> tuple[Sound, ...]:
    return tuple(replace(x, plan=as_run(x.plan, 1)) for x in whole_plans())


@cache
def _several_rows() -> tuple[Sound, ...]:
    return tuple(replace(x, plan=as_run(x.plan, max(ROWS))) for x in whole_plans())


def as_run(whole: Plan, rows: int) -> Plan:
    """``whole`` with those kernels alone that steps of ``rows`` rows run on."""
    launches = tuple(replace(x, kernel=whole.kernel_for(x, rows).name) for x in whole.launches)
    kernels = {name: replace(kernel, several=None) for name, kernel in whole.kernels.items()}
    return replace(whole, kernels=kernels, launches=launches)


def drawn(batch: int, random: Random) -> Sound:
    """One of :func:`sound_plans`, each kind as often as the others."""
    kind = random.choice(KINDS_OF_PLAN)
    return random.choice([x for x in sound_plans(batch) if x.kind == kind])
