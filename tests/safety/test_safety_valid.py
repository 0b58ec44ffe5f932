"""Every plan that the compiler makes is accepted, by the checker and by the machine, and quickly."""

from __future__ import annotations

import gc
import time

import pytest
from graphs import OTHER, baseline, pipeline
from judge import translator
from sound_plans import CHAIN, CUT, JOINING, PARTLY, as_run, planned, sound_plans, whole_plans

from flintc.codegen.sampler import with_sampler
from flintc.ir.build import Weights
from flintc.ir.plan import Plan
from flintc.passes import PASSES, run_pipeline
from flintc.passes.dependent_launch import DependentLaunch
from flintc.passes.split_arrivals import SplitArrivals
from flintc.safety import check_plan, find_hazards

PREFIXES = range(len(PASSES) + 1)
#: Prefixes after which launches are chained: with arrivals, and cut where their last arrivers would go on.
CHAINED = (len(JOINING) + 1, len(JOINING) + 2)


def after(spec: str, weights: Weights, prefix: int) -> Plan:
    return planned(pipeline(spec, weights).steps[prefix].graph)


def test_both_kinds_of_plan_are_among_the_prefixes() -> None:
    assert (*JOINING, CHAIN, CUT) == tuple(PASSES)
    for spec, weights in (("flint", "bf16"), ("tiny-flint", "bf16"), (OTHER, "bf16")):
        joined, cut = (pipeline(spec, weights).steps[prefix].graph for prefix in CHAINED)
        assert len(joined.launches) < len(cut.launches)


def test_some_of_either_kind_read_a_cache_ahead_of_their_wait() -> None:
    for kind in ("joined", "cut"):
        paths = [path for x in whole_plans() if x.kind == kind for k in x.plan.kernels.values() for path in k.paths]
        early = [[e for e in path if e.param == "cache_ptr" and e.kind == "read"] for path in paths]
        assert any([bool(e.earlier) for e in reads] == [True, False] for reads in early)


@pytest.mark.parametrize(
    ("spec", "weights"),
    [("flint", "bf16"), ("flint", "nvfp4"), ("tiny-flint", "bf16"), ("tiny-flint", "nvfp4"), (OTHER, "bf16")],
    ids=["flint-bf16", "flint-nvfp4", "tiny-bf16", "tiny-nvfp4", "other-bf16"],
)
def test_every_prefix_of_every_spec(spec: str, weights: Weights) -> None:
    for prefix in PREFIXES:
        assert not find_hazards(with_sampler(after(spec, weights, prefix)))


@pytest.mark.parametrize("options", [DependentLaunch(trigger="late"), DependentLaunch(prefetch=False)], ids=str)
@pytest.mark.parametrize(
    "streams", [None, 0, PARTLY.streams, 1 << 40], ids=["joined", "cut everywhere", "partly cut", "cut nowhere"]
)
def test_every_way_of_chaining(options: DependentLaunch, streams: int | None) -> None:
    """``streams``: the weights from which on a launch that counts is left whole; None where none is cut."""
    cut = () if streams is None else (SplitArrivals(streams=streams, chain=options),)
    for spec in ("tiny-flint", OTHER):
        check_plan(planned(run_pipeline(baseline(spec), [*JOINING, options, *cut]).graph))


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_the_machine_agrees_at_every_batch_size(batch: int) -> None:
    whole = [after(spec, "bf16", prefix) for spec in ("tiny-flint", OTHER) for prefix in CHAINED]
    for made in (*(x.plan for x in sound_plans(batch)), *(as_run(x, batch) for x in whole)):
        machine = translator(batch).machine(made)
        assert machine.hazard(stalled=len(made.launches) + 1, shuffles=1, seed=batch) == ""


def test_the_whole_of_flint_takes_less_than_a_third_of_a_second() -> None:
    """In one of twenty tries: what else runs on the machine only adds to it, and may go on for a while."""
    for prefix in (0, *CHAINED):
        made = after("flint", "bf16", prefix)
        gc.collect()  # what other tests left behind is not the checker's
        assert any(seconds_of_checking(made) < 0.3 for _ in range(20))


def seconds_of_checking(made: Plan) -> float:
    begin = time.process_time()
    check_plan(made)
    return time.process_time() - begin


@pytest.mark.parametrize(("weights", "prefix"), [*(("bf16", prefix) for prefix in CHAINED), ("nvfp4", CHAINED[-1])])
def test_the_whole_of_flint_in_the_machine(weights: Weights, prefix: int) -> None:
    """In turn, and in one random order: holding back every program of hundreds of launches would take minutes.

    Of BF16 the launches that stream their weights are left whole where others are cut, of NVFP4 all are cut.
    """
    whole = after("flint", weights, prefix)
    for batch in (1, 8):
        machine = translator(batch).machine(as_run(whole, batch))
        assert machine.hazard(stalled=0, shuffles=1) == ""
