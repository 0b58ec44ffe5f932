"""Every launch of every pipeline prefix on the GPU, from the values the reference feeds it."""

from __future__ import annotations

import pytest
import torch
from device_cases import PIPELINE, Case, make_case
from padding import check_padded
from tolerance import assert_close, rounded_probabilities
from torch import Tensor

from flintc.ir.graph import Graph, Launch

pytestmark = pytest.mark.gpu

#: Roundings between a launch's inputs and each of its outputs, where it is not one.
CHAINED = {"qkv": 2, "expert_gate_up": 2, "gate_up": 2, "expert_down": 3, "route": 2}

Rows = slice | list[int]


def check_launches(case: Case, live: Rows, padded: Rows = slice(0)) -> None:
    """Run each launch alone on the reference's inputs and compare what it makes."""
    step, graph = case.step, case.plan.graph
    for planned, ready in zip(case.plan.launches, step.launches(case.rows), strict=True):
        launch = graph.launch_of[next(x for x in graph.launches if x.name == planned.name).ops[0]]
        prepare(case, launch)
        ready(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for name in graph.writes(launch):
            if name in case.plan.placement:
                got, want = step.value(name, case.rows).cpu(), case.values[name]
                slack = rounded_probabilities(graph, launch, name, {**case.given, **case.values})
                slack = slack[live] if isinstance(slack, Tensor) else slack
                check_value(graph, launch, name, got[live], want[live], slack)
                check_padded(graph, name, got[padded], want[padded])
    for counters in step.scratch.values():
        assert not counters.any()


def prepare(case: Case, launch: Launch) -> None:
    """Poison, and in it what ``launch`` reads."""
    step, graph = case.step, case.plan.graph
    case.reset()
    for name in graph.writes(launch):
        if graph.values[name].type.dtype == "i32":
            step.value(name, case.rows).fill_(0x55)  # the bits of NaN are those of -1, the id of no expert
    for name in graph.reads(launch):
        if name in case.plan.placement:
            step.value(name, case.rows).copy_(case.values[name])
        elif graph.values[name].kind == "cache" and name in case.values:
            step.tensors[step.stored(name)].copy_(case.values[name])


def check_value(
    graph: Graph, launch: Launch, name: str, got: Tensor, want: Tensor, slack: Tensor | float = 0.0
) -> None:
    """One value of the rows that belong to a sequence."""
    if graph.values[name].type.dtype == "i32":
        assert torch.equal(got, want), name
    elif ".a." in name or name.endswith(("a.o", "a.m", "a.l")):
        assert torch.allclose(torch.nan_to_num(got), torch.nan_to_num(want), rtol=2e-2, atol=2e-2), name
    else:
        assert_close(got, want, CHAINED.get(launch.role, 1), slack)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("after", PIPELINE)
def test_every_launch_of_a_prefix(after: str, rows: int, weights: str) -> None:
    check_launches(make_case("tiny-flint", weights, after, rows), slice(None))


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("after", PIPELINE)
def test_padded_rows_among_others(after: str, weights: str) -> None:
    padded = [1, 4, 7]
    case = make_case("tiny-flint", weights, after, 8, padded)
    chosen = [op.outputs[0] for op in case.plan.graph.ops.values() if op.kind == "topk"]
    assert chosen and all((case.values[name][padded] == -1).all() for name in chosen)
    check_launches(case, [0, 2, 3, 5, 6], padded)
