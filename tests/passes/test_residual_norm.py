"""Pass 1 on planted graphs: what it must take, and what only looks like it."""

import pytest
from graphs import Sketch, crossings, partition

from flintc.passes import run_pipeline

EPS = 1e-6


def sketch():
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.given("r", "bf16", "B", 64)
    s.weight("w", "f32", 64)
    return s


def run(graph):
    return run_pipeline(graph, ["residual-norm"])


def test_takes_the_add_and_the_norm_of_its_sum():
    s = sketch()
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w"], "h", eps=EPS)
    got = run(s.graph("h", "residual"))
    assert partition(got.graph) == "add_norm(add norm)"
    assert crossings(got.graph, "add_norm") == {"sum": "local"}
    assert got.steps[1].matched == 1


def test_takes_it_with_two_readers_of_the_normed_row():
    s = sketch()
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w"], "h", eps=EPS)
    s.op("again", "norm", ["h", "w"], "h2", eps=EPS)
    s.op("total", "sum", ["h", "h2"], "y")
    assert partition(run(s.graph("y", "residual")).graph) == "add_norm(add norm) | again | total"


def near_miss_second_consumer():
    s = sketch()
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w"], "h", eps=EPS)
    s.op("other", "norm", ["sum", "w"], "h2", eps=EPS)
    return s.graph("h", "h2", "residual")


def near_miss_sum_is_an_output():
    s = sketch()
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w"], "h", eps=EPS)
    return s.graph("h", "sum", "residual")


def near_miss_other_dtype():
    """The norm reads the rounded residual, not the FP32 sum."""
    s = sketch()
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["residual", "w"], "h", eps=EPS)
    return s.graph("h", "sum")


def near_miss_other_axis():
    """The norm reduces each head's channels, not the row."""
    s = Sketch()
    s.given("x", "bf16", "B", 4, 16)
    s.given("r", "bf16", "B", 4, 16)
    s.weight("w", "f32", 16)
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w"], "h", eps=EPS)
    return s.graph("h", "residual")


@pytest.mark.parametrize(
    ("near_miss", "refusal"),
    [
        (near_miss_second_consumer, "add.sum has another reader"),
        (near_miss_sum_is_an_output, "add.sum has another reader"),
        (near_miss_other_dtype, None),
        (near_miss_other_axis, "not so: add.sum has 2 dimensions"),
    ],
)
def test_refuses(near_miss, refusal):
    graph = near_miss()
    got = run(graph)
    assert got.graph.launches == graph.launches
    assert list(got.steps[1].matches[0].refused) == ([refusal] if refusal else [])
