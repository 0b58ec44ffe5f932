"""Pass 4 on planted graphs: what it must take, and what only looks like it."""

import pytest
from graphs import Sketch, crossings, partition

from flintc.passes import run_pipeline

EPS = 1e-6


def sketch(*, add=True, shared=True, shared_dtype="bf16"):
    """[add ->] norm -> router -> top-k -> expert gate/up -> silu, and the shared expert's beside it."""
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.given("r", "bf16", "B", 64)
    s.given("seqs", "i32", "B")
    s.weight("w.norm", "f32", 64)
    s.weight("w.router", "f32", 8, 64)
    s.weight("w.expert", "bf16", 8, 96, 64)
    s.weight("w.shared", shared_dtype, 80, 64)
    if add:
        s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum" if add else "x", "w.norm"], "h", eps=EPS)
    s.op("router", "router", ["h", "w.router"], "logits")
    s.op("topk", "topk", ["logits", "seqs"], "ids mix", k=3)
    s.op("gate_up", "expert_linear", ["h", "ids", "w.expert"], "gu", out="f32")
    s.op("silu", "silu_mul", ["gu"], "act")
    if shared:
        s.op("s_gate_up", "linear", ["h", "w.shared"], "sgu")
        s.op("s_silu", "silu_mul", ["sgu"], "sact")
    return s


def outputs(add=True, shared=True):
    return ("act", "mix", *(("residual",) if add else ()), *(("sact",) if shared else ()))


def run(graph):
    return run_pipeline(graph, ["router-expert-gemv"])


def test_takes_a_layer_with_a_shared_expert():
    got = run(sketch().graph(*outputs())).graph
    assert partition(got) == "route(add norm router topk) | expert_gate_up(gate_up silu s_gate_up s_silu)"
    assert crossings(got, "route") == {"sum": "local", "h": "recompute", "logits": "last-arriver:row"}
    assert crossings(got, "expert_gate_up") == {"gu": "local", "sgu": "local"}


def test_takes_a_layer_without_a_shared_expert():
    got = run(sketch(shared=False).graph(*outputs(shared=False))).graph
    assert partition(got) == "route(add norm router topk) | expert_gate_up(gate_up silu)"


def test_takes_a_first_layer_that_adds_nothing():
    got = run(sketch(add=False).graph(*outputs(add=False))).graph
    assert partition(got) == "route(norm router topk) | expert_gate_up(gate_up silu s_gate_up s_silu)"


def test_joins_an_add_and_norm_that_share_a_launch_already():
    got = run_pipeline(sketch().graph(*outputs()), ["residual-norm", "router-expert-gemv"]).graph
    assert partition(got) == "route(add norm router topk) | expert_gate_up(gate_up silu s_gate_up s_silu)"


def test_keeps_the_add_apart_where_its_sum_is_read_elsewhere():
    s = sketch()
    s.op("other", "norm", ["sum", "w.norm"], "h2", eps=EPS)
    got = run(s.graph(*outputs(), "h2")).graph
    assert "route(norm router topk)" in partition(got)
    assert partition(got).startswith("add | ")


def test_refuses_to_route_where_the_logits_are_read_elsewhere():
    s = sketch()
    s.op("second", "topk", ["logits", "seqs"], "ids2 mix2", k=1)
    got = run(s.graph(*outputs(), "ids2"))
    assert "route(" not in partition(got.graph)
    assert got.steps[1].matches[0].refused == {"router.logits has another reader": 1}


def test_refuses_experts_whose_product_is_read_elsewhere():
    s = sketch()
    s.op("again", "silu_mul", ["gu"], "act2")
    assert "expert_gate_up" not in partition(run(s.graph(*outputs(), "act2")).graph)


def test_refuses_to_join_weights_of_two_formats():
    got = run(sketch(shared_dtype="nvfp4").graph(*outputs())).graph
    assert partition(got) == "route(add norm router topk) | expert_gate_up(gate_up silu) | s_gate_up | s_silu"


def test_refuses_experts_with_a_row_each():
    """Other axis: x is [B, k, K], one row per rank."""
    s = Sketch()
    s.given("x", "bf16", "B", 3, 64)
    s.given("ids", "i32", "B", 3)
    s.weight("w", "bf16", 8, 96, 64)
    s.op("gate_up", "expert_linear", ["x", "ids", "w"], "gu", out="f32")
    s.op("silu", "silu_mul", ["gu"], "act")
    graph = s.graph("act")
    assert run(graph).graph.launches == graph.launches


def test_refuses_a_shared_expert_that_reads_another_row():
    s = sketch(shared=False)
    s.op("s_gate_up", "linear", ["x", "w.shared"], "sgu")
    s.op("s_silu", "silu_mul", ["sgu"], "sact")
    got = run(s.graph(*outputs())).graph
    assert "expert_gate_up(gate_up silu)" in partition(got)


def test_refuses_a_launch_that_would_wait_for_itself():
    """The experts are chosen by what the shared expert made: both in one launch would wait for each other."""
    s = Sketch()
    s.given("h", "bf16", "B", 64)
    s.given("seqs", "i32", "B")
    s.weight("w.router", "f32", 8, 40)
    s.weight("w.expert", "bf16", 8, 96, 64)
    s.weight("w.shared", "bf16", 80, 64)
    s.op("s_gate_up", "linear", ["h", "w.shared"], "sgu")
    s.op("s_silu", "silu_mul", ["sgu"], "sact")
    s.op("router", "router", ["sact", "w.router"], "logits")
    s.op("topk", "topk", ["logits", "seqs"], "ids mix", k=3)
    s.op("gate_up", "expert_linear", ["h", "ids", "w.expert"], "gu", out="f32")
    s.op("silu", "silu_mul", ["gu"], "act")
    graph = s.graph("act", "mix")
    got = run(graph)
    assert got.graph.launches == graph.launches
    refused = {count.rule: dict(count.refused) for count in got.steps[1].matches}
    assert refused["expert and shared gate/up+silu"] == {"its launch would wait for itself": 1}


@pytest.mark.parametrize("tile", [4, 32])
def test_the_tile_is_an_option(tile):
    from flintc.passes.router_expert_gemv import RouterExpertGemv

    got = run_pipeline(sketch().graph(*outputs()), [RouterExpertGemv(tile=tile)]).graph
    assert [x.tile for x in got.launches] == [tile, tile]
