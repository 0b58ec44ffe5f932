"""Every plan that the compiler makes is accepted, by the checker and by the machine, and quickly."""

from __future__ import annotations

import gc
import time

import pytest
from graphs import OTHER, baseline
from judge import as_run, base_plans, translator

from flintc.codegen.planner import plan
from flintc.codegen.sampler import with_sampler
from flintc.ir.build import Weights
from flintc.ir.plan import Plan
from flintc.passes import PASSES, run_pipeline
from flintc.passes.dependent_launch import DependentLaunch
from flintc.safety import check_plan, find_hazards

PREFIXES = range(len(PASSES) + 1)


def planned(spec: str, weights: Weights, prefix: int) -> Plan:
    return plan(run_pipeline(baseline(spec, weights), list(PASSES)[:prefix]).graph)


@pytest.mark.parametrize(
    ("spec", "weights"),
    [("flint", "bf16"), ("flint", "nvfp4"), ("tiny-flint", "bf16"), ("tiny-flint", "nvfp4"), (OTHER, "bf16")],
    ids=["flint-bf16", "flint-nvfp4", "tiny-bf16", "tiny-nvfp4", "other-bf16"],
)
def test_every_prefix_of_every_spec(spec: str, weights: Weights) -> None:
    for prefix in PREFIXES:
        assert not find_hazards(with_sampler(planned(spec, weights, prefix)))


@pytest.mark.parametrize("options", [DependentLaunch(trigger="late"), DependentLaunch(prefetch=False)], ids=str)
def test_every_way_of_chaining(options: DependentLaunch) -> None:
    for spec in ("tiny-flint", OTHER):
        check_plan(plan(run_pipeline(baseline(spec), [*list(PASSES)[:-1], options]).graph))


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_the_machine_agrees_at_every_batch_size(batch: int) -> None:
    whole = (planned("tiny-flint", "bf16", len(PASSES)), planned(OTHER, "bf16", len(PASSES)))
    for made in (*base_plans(batch), *(as_run(x, batch) for x in whole)):
        machine = translator(batch).machine(made)
        assert machine.hazard(stalled=len(made.launches) + 1, shuffles=1, seed=batch) == ""


def test_the_whole_of_flint_takes_less_than_a_third_of_a_second() -> None:
    for prefix in (0, len(PASSES)):
        made = planned("flint", "bf16", prefix)
        gc.collect()  # what other tests left behind is not the checker's
        begin = time.process_time()
        check_plan(made)
        assert time.process_time() - begin < 0.3


def test_the_whole_of_flint_in_the_machine() -> None:
    """In turn, and in one random order: holding back every program of 346 launches would take minutes."""
    whole = planned("flint", "bf16", len(PASSES))
    for batch in (1, 8):
        machine = translator(batch).machine(as_run(whole, batch))
        assert machine.hazard(stalled=0, shuffles=1) == ""
