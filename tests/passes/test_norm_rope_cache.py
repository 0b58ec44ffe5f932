"""Pass 2 on planted graphs: what it must take, and what only looks like it."""

import pytest
from graphs import Sketch, crossings, partition

from flintc.passes import run_pipeline

EPS = 1e-6


def sketch(*, rope=True, q=(0, 4), k=(4, 2), v=(6, 2), cache="bf16", heads=8, second_reader=None):
    """h -> qkv -> q/k norm [-> rope] -> cache, with 8 heads of 16 channels."""
    s = Sketch()
    s.given("h", "bf16", "B", 64)
    for name in ("positions", "seqs"):
        s.given(name, "i32", "B")
    s.given("table", "i32", "Q", "T")
    s.given("cache", cache, "P", 2, 2, 8, 16, kind="cache")
    s.given("rope_table", "f32", "C", 2, 8, kind="table")
    s.weight("w.qkv", "bf16", 8 * 16, 64)
    s.weight("w.norm", "f32", 16)
    s.op("qkv", "linear", ["h", "w.qkv"], "qkv", heads=heads)
    s.op("q_norm", "head_norm", ["qkv", "w.norm"], "q", eps=EPS, heads=q)
    s.op("k_norm", "head_norm", ["qkv", "w.norm"], "k", eps=EPS, heads=k)
    if rope:
        s.op("rope", "rope", ["q", "k", "positions", "rope_table"], "q_turned k_turned")
    if second_reader:
        s.op("other", "head_norm", [second_reader, "w.norm"], "o", eps=EPS, heads=(0, 2))
    key = "k_turned" if rope else "k"
    s.op("kv_write", "kv_write", [key, "qkv", "cache", "positions", "seqs", "table"], "cache.1", v_heads=v)
    outputs = ["q_turned" if rope else "q", "cache.1", *(["o"] if second_reader else [])]
    return s.graph(*outputs)


def run(graph):
    return run_pipeline(graph, ["norm-rope-cache"])


def test_takes_a_layer_with_rope():
    got = run(sketch()).graph
    assert partition(got) == "qkv(qkv q_norm k_norm rope kv_write)"
    assert crossings(got, "qkv") == {
        "qkv": "last-arriver:head",
        "q": "local",
        "k": "local",
        "k_turned": "local",
    }
    assert got.launches[0].tile == 16


def test_takes_a_layer_without_rope():
    got = run(sketch(rope=False)).graph
    assert partition(got) == "qkv(qkv q_norm k_norm kv_write)"
    assert crossings(got, "qkv") == {"qkv": "last-arriver:head", "k": "local"}


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"second_reader": "qkv"}, "linear.y has another reader"),
        ({"second_reader": "k"}, "head_norm.y has another reader"),
        ({"cache": "f32"}, "not so: kv_write.cache is bf16"),
        ({"v": (4, 2)}, "not so: q, k and v are each head of the projection once"),
        ({"q": (0, 3)}, "not so: q, k and v are each head of the projection once"),
    ],
    ids=["second consumer of the projection", "second consumer of k", "other dtype", "v overlaps k", "a head unused"],
)
def test_refuses(change, refusal, rope):
    graph = sketch(rope=rope, **change)
    got = run(graph)
    assert got.graph.launches == graph.launches
    assert refusal in {reason for count in got.steps[1].matches for reason in count.refused}


def test_refuses_rotated_q_and_k_swapped():
    """Same ops, but the heads that are rotated as q are those written as keys."""
    s = Sketch()
    s.given("h", "bf16", "B", 64)
    s.cached()
    s.given("rope_table", "f32", "C", 2, 8, kind="table")
    s.weight("w.qkv", "bf16", 6 * 16, 64)
    s.weight("w.norm", "f32", 16)
    s.op("qkv", "linear", ["h", "w.qkv"], "qkv", heads=6)
    s.op("q_norm", "head_norm", ["qkv", "w.norm"], "q", eps=EPS, heads=(0, 2))
    s.op("k_norm", "head_norm", ["qkv", "w.norm"], "k", eps=EPS, heads=(2, 2))
    s.op("rope", "rope", ["q", "k", "positions", "rope_table"], "q_turned k_turned")
    s.op("kv_write", "kv_write", ["q_turned", "qkv", "cache", "positions", "seqs", "table"], "cache.1", v_heads=(4, 2))
    graph = s.graph("k_turned", "cache.1")
    assert run(graph).graph.launches == graph.launches
