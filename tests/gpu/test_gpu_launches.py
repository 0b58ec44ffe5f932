"""Every launch of every pipeline prefix on the GPU, from the values the reference feeds it."""

from __future__ import annotations

import pytest
import torch
from device_cases import PIPELINE, Case, make_case
from tolerance import assert_close

pytestmark = pytest.mark.gpu

#: Roundings between a launch's inputs and each of its outputs, where it is not one.
CHAINED = {"qkv": 2, "expert_gate_up": 2, "gate_up": 2, "expert_down": 3, "route": 2}


def check_launches(case: Case, live: slice) -> None:
    """Run each launch alone on the reference's inputs and compare what it makes."""
    step, graph = case.step, case.plan.graph
    for planned, ready in zip(case.plan.launches, step.launches(case.rows), strict=True):
        launch = graph.launch_of[next(x for x in graph.launches if x.name == planned.name).ops[0]]
        case.reset()
        for name in graph.reads(launch):
            if name in case.plan.placement:
                step.value(name, case.rows).copy_(case.values[name])
        for name in graph.reads(launch):
            if graph.values[name].kind == "cache" and name in case.values:
                step.tensors[step.stored(name)].copy_(case.values[name])
        ready(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for name in graph.writes(launch):
            if name not in case.plan.placement:
                continue
            got, want = step.value(name, case.rows).cpu()[live], case.values[name][live]
            if graph.values[name].type.dtype == "i32":
                assert torch.equal(got, want), name
            elif ".a." in name or name.endswith(("a.o", "a.m", "a.l")):
                assert torch.allclose(torch.nan_to_num(got), torch.nan_to_num(want), rtol=2e-2, atol=2e-2), name
            else:
                assert_close(got, want, CHAINED.get(launch.role, 1))
    for counters in step.scratch.values():
        assert not counters.any()


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("after", PIPELINE)
def test_every_launch_of_a_prefix(after: str, rows: int, weights: str) -> None:
    check_launches(make_case("tiny-flint", weights, after, rows), slice(None))
