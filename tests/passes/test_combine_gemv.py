"""Pass 5 on planted graphs: what it must take, and what only looks like it."""

from graphs import Sketch, crossings, partition

from flintc.passes import run_pipeline


def experts(*, shared=True, shared_dtype="bf16"):
    """act -> expert down -> combine [-> add of the shared expert's down]."""
    s = Sketch()
    s.given("act", "bf16", "B", 3, 48)
    s.given("ids", "i32", "B", 3)
    s.given("mix", "f32", "B", 3)
    s.given("sact", "bf16", "B", 80)
    s.weight("w.down", "bf16", 8, 64, 48)
    s.weight("w.shared", shared_dtype, 64, 80)
    s.op("down", "expert_linear", ["act", "ids", "w.down"], "y")
    s.op("combine", "combine", ["y", "mix"], "routed")
    if shared:
        s.op("s_down", "linear", ["sact", "w.shared"], "shared")
        s.op("total", "sum", ["routed", "shared"], "x")
    return s


def run(graph):
    return run_pipeline(graph, ["combine-gemv"])


def test_takes_experts_with_a_shared_one():
    got = run(experts().graph("x")).graph
    assert partition(got) == "expert_down(down combine s_down total)"
    assert crossings(got, "expert_down") == {"y": "local", "routed": "local", "shared": "local"}


def test_takes_experts_without_a_shared_one():
    got = run(experts(shared=False).graph("routed")).graph
    assert partition(got) == "expert_down(down combine)"
    assert crossings(got, "expert_down") == {"y": "local"}


def test_takes_a_dense_gate_up():
    s = Sketch()
    s.given("h", "bf16", "B", 64)
    s.weight("w", "nvfp4", 96, 64)
    s.op("gate_up", "linear", ["h", "w"], "gu")
    s.op("silu", "silu_mul", ["gu"], "act")
    got = run(s.graph("act")).graph
    assert partition(got) == "gate_up(gate_up silu)"
    assert crossings(got, "gate_up") == {"gu": "local"}


def test_refuses_a_second_consumer_of_the_routed_sum():
    s = experts()
    s.op("again", "sum", ["routed", "routed"], "twice")
    assert partition(run(s.graph("x", "twice")).graph) == "expert_down(down combine) | s_down | total | again"


def test_refuses_a_second_consumer_of_the_experts():
    s = experts()
    s.op("again", "combine", ["y", "mix"], "routed2")
    graph = s.graph("x", "routed2")
    assert run(graph).graph.launches == graph.launches


def test_refuses_to_join_weights_of_two_formats():
    assert (
        partition(run(experts(shared_dtype="nvfp4").graph("x")).graph) == "expert_down(down combine) | s_down | total"
    )


def test_refuses_experts_that_share_one_row():
    """Other axis: x is [B, K], the same for every rank."""
    s = Sketch()
    s.given("act", "bf16", "B", 48)
    s.given("ids", "i32", "B", 3)
    s.given("mix", "f32", "B", 3)
    s.weight("w.down", "bf16", 8, 64, 48)
    s.op("down", "expert_linear", ["act", "ids", "w.down"], "y")
    s.op("combine", "combine", ["y", "mix"], "routed")
    graph = s.graph("routed")
    assert run(graph).graph.launches == graph.launches


def test_refuses_a_projection_viewed_as_heads():
    """Other axis: SiLU splits each head's channels, not the projection's rows."""
    s = Sketch()
    s.given("h", "bf16", "B", 64)
    s.weight("w", "bf16", 96, 64)
    s.op("gate_up", "linear", ["h", "w"], "gu", heads=6)
    s.op("silu", "silu_mul", ["gu"], "act")
    graph = s.graph("act")
    assert run(graph).graph.launches == graph.launches


def test_refuses_a_second_consumer_of_gate_up():
    s = Sketch()
    s.given("h", "bf16", "B", 64)
    s.weight("w", "bf16", 96, 64)
    s.op("gate_up", "linear", ["h", "w"], "gu")
    s.op("silu", "silu_mul", ["gu"], "act")
    s.op("again", "sum", ["gu", "gu"], "twice")
    graph = s.graph("act", "twice")
    assert run(graph).graph.launches == graph.launches


def test_refuses_a_shared_expert_that_reads_the_routed_sum():
    """The same ops and edges, and one more: down of the row that the experts have just made needs all of it."""
    s = experts(shared=False)
    s.weight("w.square", "bf16", 64, 64)
    s.op("s_down", "linear", ["routed", "w.square"], "shared")
    s.op("total", "sum", ["routed", "shared"], "x")
    got = run(s.graph("x"))
    assert partition(got.graph) == "expert_down(down combine) | s_down | total"
    assert got.steps[1].matches[0].refused == {"its ops read each other in another way besides": 1}
