"""Every launch of every prefix of the pipeline, in the interpreter, against the reference run of the same ops.

Each launch is fed the reference's values, so that a wrong value is named by the launch that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphs import pipeline
from launches import TORCH, poisoned
from padding import check_padded
from step_cases import SPEC, Step, step
from tolerance import assert_close, rounded_probabilities
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from flintc.codegen.interpret import load_interpreted
from flintc.codegen.planner import plan
from flintc.ir.graph import Graph, Launch
from flintc.ir.plan import Arg, Plan, PlannedLaunch
from flintc.ir.types import resolve
from flintc.passes import BASELINE, PASSES

#: (position, sequence) of each row: the window's edge (13), chunks (16), a ring's wrap, a slice of a prompt, padding.
ROWS: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((13, 0),),
    3: ((12, 2), (40, 0), (0, 1)),
    8: ((13, 1), (14, 1), (15, 1), (0, -1), (63, 0), (16, 2), (11, 3), (32, 4)),
}

#: Kernels that have passed, by text and batch: a prefix has most of the kernels of the one before.
_passed: set[tuple[object, ...]] = set()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Triton's interpreter ran over a grid."""
    names: list[str] = []
    run = GridExecutor.__call__

    def counted(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    yield names


def planned(prefix: str) -> Plan:
    """The plan of the graph after a pass."""
    (graph,) = (s.graph for s in pipeline(SPEC).steps if s.name == prefix)
    return plan(graph)


@pytest.mark.parametrize("prefix", [BASELINE, *PASSES])
def test_a_call_per_launch_makes_the_values_of_the_reference(prefix: str, calls: list[str]) -> None:
    plan = planned(prefix)
    for launch in plan.launches:
        check(plan, launch, step(ROWS[3]))
    assert len(calls) == len(plan.launches) == len(plan.graph.launches)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("prefix", [BASELINE, *PASSES])
def test_every_kernel_makes_the_values_of_the_reference_at_other_batches(prefix: str, batch: int) -> None:
    """One launch of each kernel; which launch passes what to it is the same at every batch."""
    plan = planned(prefix)
    for launch in plan.launches:
        kernel = plan.kernels[launch.kernel]
        key = (kernel.source, tuple(kernel.constants.items()), batch)
        if key not in _passed:
            check(plan, launch, step(ROWS[batch]))
            _passed.add(key)


def check(plan: Plan, launch: PlannedLaunch, step: Step) -> None:
    """Run one launch on the reference's values and compare what it makes; its arrival counters must end at zero."""
    (described,) = (x for x in plan.graph.launches if x.name == launch.name)
    made = outputs(plan.graph, described, step)
    scratch = {
        name: torch.zeros([resolve(d, step.env) for d in s.type.shape], dtype=TORCH[s.type.dtype])
        for name, s in plan.scratch.items()
    }
    tensors = {**step.values, **made, **scratch}

    def argument(arg: Arg) -> Tensor | int:
        return step.env[arg.ref] if arg.kind == "symbol" else tensors[arg.ref]

    x, y, z = (resolve(d, step.env) for d in launch.grid)
    load_interpreted(plan.kernels[launch.kernel])((x, y, z), [argument(a) for a in launch.args])
    for value in plan.graph.writes(described):
        try:
            slack = rounded_probabilities(plan.graph, described, value, step.values)
            compare(plan.graph, value, made[value], step, slack)
        except AssertionError as error:
            raise AssertionError(f"launch {launch.name}, {value}: {error}") from None
    assert not any(counters.any() for counters in scratch.values()), f"{launch.name} leaves its counters changed"


def outputs(graph: Graph, launch: Launch, step: Step) -> dict[str, Tensor]:
    """Memory for what a launch makes: poison, and for a cache the version before it."""
    made: dict[str, Tensor] = {}
    for op in (graph.ops[o] for o in launch.ops):
        for value in op.outputs:
            written = op.kind == "kv_write"
            made[value] = step.values[op.inputs[2]].clone() if written else poisoned(graph.values[value].type, step.env)
    return made


def compare(graph: Graph, name: str, got: Tensor, step: Step, slack: Tensor | float) -> None:
    """One value against the reference's, padded rows by their own measure; what that leaves NaN must be NaN."""
    want = step.values[name]
    if graph.values[name].kind != "cache":
        check_padded(graph, name, got[~step.live], want[~step.live])
        got, want = got[step.live], want[step.live]
        slack = slack[step.live] if isinstance(slack, Tensor) else slack
    if want.dtype == torch.int32:
        assert torch.equal(got, want)
        return
    assert torch.equal(got.isnan(), want.isnan()), "NaN in other places"
    got, want = got.nan_to_num(), want.nan_to_num()
    if graph.ops[graph.producers[name]].kind in ("rope", "kv_write"):
        # A rotation makes a small channel out of two large ones: a step is one at the size of the pair.
        pair = torch.hypot(*want.float().chunk(2, dim=-1))
        assert_close(got, want, roundings=2, size=torch.cat((pair, pair), dim=-1))
    else:
        assert_close(got, want, roundings=2, slack=slack)
