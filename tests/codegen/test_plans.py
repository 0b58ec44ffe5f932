"""Every prefix of the pipeline of every spec can be planned, and at full size no GEMV leaves a GPU empty."""

from __future__ import annotations

from math import prod

import pytest
from graphs import OTHER, pipeline

from flintc.codegen.planner import plan
from flintc.ir.build import Weights
from flintc.ir.cost import decode_env
from flintc.ir.serialize import plan_from_json, plan_to_json
from flintc.ir.types import resolve
from flintc.passes import BASELINE, PASSES

PREFIXES = [BASELINE, *PASSES]
SPECS: list[tuple[str, Weights]] = [
    ("flint", "bf16"), ("flint", "nvfp4"), ("tiny-flint", "bf16"), ("tiny-flint", "nvfp4"), (OTHER, "bf16"),
]  # fmt: skip
GEMV = {"linear", "router", "expert_linear"}
LEAST_PROGRAMS = 64


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("spec", "weights"), SPECS, ids=["flint", "flint-nvfp4", "tiny", "tiny-nvfp4", "other"])
def test_every_prefix_of_every_spec_can_be_planned(spec: str, weights: Weights, prefix: str) -> None:
    (step,) = (s for s in pipeline(spec, weights).steps if s.name == prefix)
    made = plan(step.graph)
    assert [x.name for x in made.launches] == [x.name for x in step.graph.launches]
    used = [made.kernel_for(x, rows).name for x in made.launches for rows in (1, 8)]
    assert set(used) == made.kernels.keys()
    # Layers of a kind share their kernels: as many as there are different launches, not as there are layers.
    assert len({x.kernel for x in made.launches}) <= 30


def test_what_lies_apart() -> None:
    """Launches of fewer programs than multiprocessors, which follow launches that fill these."""
    made = plan(pipeline("flint", "nvfp4").graph)
    apart = {x.name.partition(".")[2] for x in made.launches if made.kernels[x.kernel].apart}
    assert apart == {"route", "expert_down"}
    assert all(made.kernel_for(x, 8).apart == made.kernels[x.kernel].apart for x in made.launches)
    assert plan_from_json(plan_to_json(made)) == made


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_no_gemv_of_full_flint_has_fewer_than_64_programs(weights: Weights, prefix: str) -> None:
    (step,) = (s for s in pipeline("flint", weights).steps if s.name == prefix)
    env = decode_env(step.graph, context=1, batch=1)
    launches = {x.name: x for x in step.graph.launches}
    programs = {
        x.name: prod(resolve(d, env) for d in x.grid)
        for x in plan(step.graph).launches
        if GEMV & {step.graph.ops[o].kind for o in launches[x.name].ops}
    }
    # qkv, o, the MLP's two or more, the router where there is one; and the head.
    assert len(programs) >= 4 * 49 + 47 + 1
    assert {name: n for name, n in programs.items() if n < LEAST_PROGRAMS} == {}
