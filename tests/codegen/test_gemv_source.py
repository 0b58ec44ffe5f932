"""The text of the generated matrix-vector kernels: golden, formatted, its loads on the right side of the wait."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from gemv_graphs import chained
from golden import check_golden
from launches import only_kernel
from test_gemv_aot import GRAPHS, TILES

from flintc.ir.graph import Dependent, Graph

GOLDEN = {"o": "bf16", "qkv_window": "bf16", "expert_gate_up": "bf16", "expert_down": "nvfp4", "route": "bf16"}


def source(name: str, weights: str) -> str:
    return only_kernel(chained(GRAPHS[name](weights), TILES.get(name, 16))).source  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "weights"), GOLDEN.items())
def test_generated_source(name: str, weights: str) -> None:
    check_golden(f"kernels/{name}_{weights}.py", source(name, weights))


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_generated_source_is_formatted(weights: str) -> None:
    for name in GRAPHS:
        command = [sys.executable, "-m", "ruff", "format", "--check", "--line-length=120", "--stdin-filename=k.py", "-"]
        result = subprocess.run(command, input=source(name, weights), capture_output=True, text=True)
        assert result.returncode == 0, f"{name}: {result.stderr}"


def read_above_the_wait(graph: Graph) -> list[set[str]]:
    """Parameters that each path of the one kernel reads before it waits; each waits once."""
    above = []
    for path in only_kernel(graph).paths:
        kinds = [effect.kind for effect in path]
        assert kinds.count("wait") == 1
        above.append({effect.param for effect in path[: kinds.index("wait")] if effect.kind == "read"})
    return above


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("o", "weight_ptr"),
        ("gate_up", "weight_ptr"),
        ("qkv_window", "weight_ptr"),
        ("expert_gate_up", "shared_ptr"),
        ("route", "router_ptr"),
    ],
)
def test_weights_are_read_above_the_wait_only_if_the_launch_says_so(name: str, weight: str) -> None:
    graph = chained(GRAPHS[name]("bf16"), TILES.get(name, 16))
    assert any(weight in parameters for parameters in read_above_the_wait(graph))
    below = graph.with_launches(tuple(replace(x, dependent=Dependent()) for x in graph.launches))
    assert all(parameters <= {"positions_ptr", "seqs_ptr"} for parameters in read_above_the_wait(below))


def test_trigger_may_stand_last() -> None:
    graph = chained(GRAPHS["o"]("bf16"), 16)
    late = graph.with_launches(tuple(replace(x, dependent=Dependent((), "late")) for x in graph.launches))
    for launch, place in ((graph, 0), (late, -1)):
        (path,) = only_kernel(launch).paths
        assert path[place].kind == "trigger"
