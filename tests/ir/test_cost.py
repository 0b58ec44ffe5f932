"""Costs against figures worked out by hand from the published sizes of Flint, not from the graph."""

import pytest
from graphs import Sketch, baseline, pipeline

from flintc.ir.cost import Cost, decode_env, evaluations, graph_cost, launch_cost, programs
from flintc.ir.graph import Crossing

LAYERS, FULL, DENSE, MOE = 49, 14, 2, 47
H, HEADS, KV, D = 2048, 32, 4, 128
ATTENTION = (HEADS + 2 * KV) * D * H + HEADS * D * H
DENSE_MLP, EXPERT, SHARED, ROUTER = 3 * 6144 * H, 3 * 512 * H, 3 * 1024 * H, 256 * H
#: Bytes of one partial of all heads; the most that a row has over the whole context, each of 128 positions at least,
#: and those of 64 positions in a window.
PARTIAL, FULL_PARTIALS, WINDOW_PARTIALS = HEADS * (D + 2) * 4, 66, 9
#: Arithmetic of merging one.
MERGE = 2 * HEADS * D


def read_by_weights(bytes_per_value):
    linear = LAYERS * ATTENTION + DENSE * DENSE_MLP + MOE * (6 * EXPERT + SHARED)
    return linear * bytes_per_value, MOE * ROUTER * 4


def step(spec="flint", weights="nvfp4", index=-1):
    return pipeline(spec, weights).steps[index].graph


def joined(weights="nvfp4"):
    """The step before launches are cut at their arrivals."""
    return next(s.graph for s in pipeline("flint", weights).steps if s.name == "dependent-launch")


def cost_of(graph, role, layer, **env):
    (launch,) = (x for x in graph.layer_launches(layer) if x.role == role)
    return launch_cost(graph, launch, decode_env(graph, **env))


@pytest.mark.parametrize(("weights", "width", "gigabytes"), [("nvfp4", 4.5 / 8, 1.23), ("bf16", 2, 4.37)])
def test_weights_read_per_forward(weights, width, gigabytes):
    linear, router = read_by_weights(width)
    assert linear / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert 0.05e9 < router < 0.10e9
    graph = step(weights=weights)
    nothing_cached = graph_cost(graph, decode_env(graph, context=1), graph.body).bytes_read
    assert nothing_cached == pytest.approx(linear + router, rel=0.01)


def test_kv_read_per_forward_at_100k():
    """205 MB a long attention; 513 tokens on each sliding layer, 36.8 MB for all 35."""
    graph = joined()
    token = 2 * KV * D * 2
    full = cost_of(graph, "attention", 5, context=100_000)
    assert 100_000 * token == 204.8e6
    assert full.bytes_read == pytest.approx(204.8e6 + FULL_PARTIALS * PARTIAL, rel=0.001)
    sliding = cost_of(graph, "attention", 2, context=100_000)
    assert 35 * 513 * token == pytest.approx(36.8e6, rel=0.001)
    partials = WINDOW_PARTIALS * PARTIAL
    q, sinks, lengths, table = HEADS * D * 2, HEADS * 4, 2 * 4, 4 * 9
    assert sliding.bytes_read == 513 * token + partials + q + sinks + lengths + table


@pytest.mark.parametrize("layer", [2, 5])
@pytest.mark.parametrize("context", [1, 100, 1000, 100_000])
def test_attention_and_its_merge_cost_the_same_apart(layer, context):
    """But that each launch reads the rows' positions and sequences: partials pass through memory either way."""
    one = cost_of(joined(), "attention", layer, context=context)
    two = [cost_of(step(), role, layer, context=context) for role in ("attention_partial", "attention_merge")]
    assert sum(c.bytes_read for c in two) == one.bytes_read + 2 * 4
    assert sum(c.bytes_written for c in two) == one.bytes_written
    assert sum(c.flops for c in two) == one.flops


@pytest.mark.parametrize(
    ("context", "partials"),
    [(1, 1), (128, 1), (129, 2), (66 * 128 - 128, 65), (66 * 128 - 127, 66), (66 * 128 + 1, 66), (100_000, 66)],
)
def test_a_row_has_a_partial_a_chunk_up_to_the_most(context, partials):
    """What its chunks make of it, not what there is room for, is written, read and merged."""
    made = cost_of(step(), "attention_partial", 5, context=context)
    assert (made.programs, made.bytes_written) == (KV * partials, partials * PARTIAL)
    merged = cost_of(step(), "attention_merge", 5, context=context)
    assert merged.bytes_read == partials * PARTIAL + HEADS * 4 + 2 * 4
    assert merged.flops == partials * MERGE


@pytest.mark.parametrize(("weights", "floor"), [("nvfp4", 4.2e9), ("bf16", 7.4e9)])
def test_bytes_at_100k_are_those_of_the_roofline(weights, floor):
    """Beside attention's partials, which the step itself has made."""
    graph = step(weights=weights)
    got = graph_cost(graph, decode_env(graph, 100_000), graph.body).bytes_read
    partials = (FULL * FULL_PARTIALS + (LAYERS - FULL) * WINDOW_PARTIALS) * PARTIAL
    assert got - partials == pytest.approx(floor, rel=0.02)


def test_flops_are_twice_the_active_parameters_and_attention():
    graph = step()
    parameters = LAYERS * ATTENTION + DENSE * DENSE_MLP + MOE * (6 * EXPERT + SHARED + ROUTER)
    attention = 4 * HEADS * D * (FULL * 10_000 + 35 * 513)
    merges = (FULL * FULL_PARTIALS + 35 * WINDOW_PARTIALS) * MERGE
    got = graph_cost(graph, decode_env(graph, 10_000), graph.body).flops
    assert got == pytest.approx(2 * parameters + attention + merges, rel=0.002)


def test_context_shorter_than_the_window():
    graph = joined()
    short, long = (cost_of(graph, "attention", 2, context=n) for n in (100, 513))
    assert short.bytes_read < long.bytes_read == cost_of(graph, "attention", 2, context=514).bytes_read


@pytest.mark.parametrize(("rows", "experts"), [(1, 6), (8, 48), (42, 252), (43, 256), (1000, 256)])
def test_experts_read_are_those_chosen_and_never_more_than_there_are(rows, experts):
    graph = step(weights="bf16", index=0)
    (launch,) = (x for x in graph.layer_launches(2) if x.name == "L2.expert_down")
    got = launch_cost(graph, launch, decode_env(graph, 1, rows)).bytes_read
    assert got == experts * H * 512 * 2 + rows * 6 * 512 * 2 + rows * 6 * 4


def test_embedding_reads_one_row_per_token():
    graph = step(index=0)
    got = launch_cost(graph, graph.launches[0], decode_env(graph, 100, 3))
    assert (got.bytes_read, got.bytes_written) == (3 * H * 2 + 3 * 4, 3 * H * 2)


def test_the_cache_write_reads_its_heads_and_writes_one_token_a_row():
    graph = step(index=0)
    got = cost_of(graph, "kv_write", 2, context=100, batch=2)
    keys = values = 2 * KV * D * 2
    assert got.bytes_written == keys + values
    assert got.bytes_read == keys + values + 2 * 4 * 3


def test_a_local_value_costs_nothing_and_a_late_one_is_written_and_read():
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.given("r", "bf16", "B", 64)
    s.weight("w", "f32", 64)
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w"], "h", eps=1e-6)
    graph = s.fused(["h"], "add_norm", "add norm", Crossing("sum", "local"))
    env = decode_env(graph, 1, 2)
    apart = graph_cost(s.graph("h"), env)
    local = graph_cost(graph, env)
    assert (local.bytes_read, local.bytes_written) == (2 * 2 * 64 * 2 + 64 * 4, 2 * 64 * 2)
    assert apart.bytes - local.bytes == 2 * (2 * 64 * 4)
    late = graph_cost(s.fused(["h"], "add_norm", "add norm", Crossing("sum", "last-arriver", "row")), env)
    assert late.bytes == apart.bytes


def test_redundancy_of_the_router_launch():
    """Every program of 4 experts norms the row: 64 times, each 1 + 5 operations an element."""
    graph = joined()
    (launch,) = (x for x in graph.layer_launches(2) if x.role == "route")
    env = decode_env(graph, 100)
    assert programs(graph, launch, env) == 64
    assert {o: evaluations(graph, launch, o) for o in launch.ops} == {
        "L2.mlp_add": 64,
        "L2.mlp_norm": 64,
        "L2.router": 1,
        "L2.topk": 1,
    }
    cheap, dear = 6 * H, 2 * ROUTER
    got = launch_cost(graph, launch, env).redundancy
    assert got == pytest.approx((64 * cheap + dear) / (cheap + dear), rel=0.001)


def test_more_rows_are_not_more_redundancy():
    graph = step()
    (launch,) = (x for x in graph.layer_launches(2) if x.role == "route")
    factors = {launch_cost(graph, launch, decode_env(graph, 100, n)).redundancy for n in (1, 2, 8)}
    assert len(factors) == 1


@pytest.mark.parametrize("spec", ["flint", "tiny-flint"])
def test_only_recompute_is_redundant(spec):
    for step in pipeline(spec).steps:
        graph = step.graph
        env = decode_env(graph, 64)
        for launch in graph.launches:
            recomputes = any(c.kind == "recompute" for c in launch.crossings)
            assert (launch_cost(graph, launch, env).redundancy > 1) == recomputes


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("add_norm", 2),
        ("qkv", 5120 // 16),
        ("attention", 2 * KV * 32),
        ("route", 256 // 4),
        ("expert_gate_up", 2 * 6 * (1024 // 16) + 2048 // 16),
        ("expert_down", 2 * (2048 // 16)),
    ],
)
def test_programs_of_two_rows(role, expected):
    """Experts of gate/up and the shared one beside them have programs of their own; those of down are added up."""
    graph = joined()
    (launch,) = (x for x in graph.layer_launches(5) if x.role == role)
    assert programs(graph, launch, decode_env(graph, 8 * 512, 2)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qkv", 5120 // 16),
        ("attention", 2 * KV * 32),
        ("attention_merge", 2 * HEADS),
        ("route", 256 // 4),
        ("topk", 2),
    ],
)
def test_programs_of_two_rows_where_launches_are_cut_at_their_arrivals(name, expected):
    graph = step()
    (launch,) = (x for x in graph.layer_launches(5) if x.name == f"L5.{name}")
    assert programs(graph, launch, decode_env(graph, 8 * 512, 2)) == expected


@pytest.mark.parametrize("make", [joined, step])
@pytest.mark.parametrize("role", ["qkv", "linear", "route", "expert_gate_up", "expert_down"])
def test_no_full_size_gemv_has_fewer_than_64_programs(role, make):
    graph = make()
    env = decode_env(graph, 4096)
    launches = [x for x in graph.layer_launches(5) if x.role == role]
    assert launches or (role, make) == ("qkv", step)
    for launch in launches:
        assert programs(graph, launch, env) >= 64


def test_costs_add():
    graph = baseline("tiny-flint")
    env = decode_env(graph, 20)
    total = Cost()
    for launch in graph.launches:
        total = total + launch_cost(graph, launch, env)
    assert total == graph_cost(graph, env)


def test_a_missing_symbol_is_named():
    graph = baseline("tiny-flint")
    with pytest.raises(KeyError, match="B"):
        graph_cost(graph, {"context": 3})
