"""Which values may cross which way inside a launch."""

import pytest
from graphs import Sketch

from flintc.ir.graph import Crossing
from flintc.ir.verify import find_issues

EPS = 1e-6


def said(g):
    return [i.message for i in find_issues(g)]


def projection():
    """x -> qkv (8 heads of 16) -> q norm, k norm; h normed from x."""
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.weight("w.row", "f32", 64)
    s.weight("w.head", "f32", 16)
    s.weight("w", "bf16", 128, 64)
    s.op("norm", "norm", ["x", "w.row"], "h", eps=EPS)
    s.op("qkv", "linear", ["h", "w"], "qkv", heads=8)
    s.op("q_norm", "head_norm", ["qkv", "w.head"], "q", eps=EPS, heads=(0, 4))
    return s


@pytest.mark.parametrize(
    ("kind", "group", "legal"),
    [
        ("local", None, False),
        ("recompute", None, False),
        ("last-arriver", "head", True),
        ("last-arriver", "row", True),
        ("last-arriver", "launch", True),
        ("last-arriver", None, False),
        ("last-arriver", "planet", False),
        ("cluster", None, True),
        ("cluster", "head", False),
        ("grid-barrier", None, True),
    ],
)
def test_a_head_norm_of_a_tiled_projection(kind, group, legal):
    """A head's channels come from several programs: they must be brought together before the norm."""
    g = projection().fused(["q"], "qkv", "qkv q_norm", Crossing("qkv", kind, group))
    assert (said(g) == []) == legal


@pytest.mark.parametrize(
    ("kind", "legal"), [("local", False), ("recompute", True), ("last-arriver", False), ("grid-barrier", True)]
)
def test_a_norm_before_a_tiled_projection(kind, legal):
    """Many programs need the whole normed row; the last one to arrive cannot do their work."""
    group = "launch" if kind == "last-arriver" else None
    g = projection().fused(["qkv"], "norm_linear", "norm qkv", Crossing("h", kind, group))
    assert (said(g) == []) == legal


def test_the_reason_names_both_sides():
    g = projection().fused(["q"], "qkv", "qkv q_norm", Crossing("qkv", "local"))
    assert said(g) == ["qkv cannot cross by local: q_norm needs the head at x; by local it finds the tile"]


def test_recompute_reaches_back_through_registers():
    """silu is cheap, but evaluating it everywhere would evaluate the projection that feeds it everywhere."""
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.weight("w1", "bf16", 96, 64)
    s.weight("w2", "bf16", 64, 48)
    s.op("up", "linear", ["x", "w1"], "gu")
    s.op("silu", "silu_mul", ["gu"], "act")
    s.op("down", "linear", ["act", "w2"], "y")
    g = s.fused(["y"], "mlp", "up silu down", Crossing("gu", "local"), Crossing("act", "recompute"))
    assert said(g) == [
        "act cannot cross by recompute: up cannot be recomputed: every program would do all the work of a linear"
    ]


def test_recompute_of_what_only_the_last_program_has():
    s = projection()
    s.op("total", "head_norm", ["q", "w.head"], "q2", eps=EPS, heads=(0, 4))
    crossings = (Crossing("qkv", "last-arriver", "head"), Crossing("q", "recompute"))
    g = s.fused(["q2"], "odd", "qkv q_norm total", *crossings)
    assert said(g) == ["q cannot cross by recompute: q_norm reads qkv, which does not reach every program"]


@pytest.mark.parametrize(
    ("kind", "group", "legal"),
    [("local", None, False), ("last-arriver", "launch", False), ("cluster", None, False), ("grid-barrier", None, True)],
)
def test_attention_after_the_cache_write(kind, group, legal):
    """A row may attend to what another row of the step writes: nothing less than a barrier over the grid will do."""
    s = Sketch()
    s.given("q", "bf16", "B", 2, 16)
    s.given("kv", "bf16", "B", 2, 16)
    s.cached()
    s.op("write", "kv_write", ["kv", "kv", "cache", "positions", "seqs", "table"], "cache.1", v_heads=(0, 2))
    given, cut = ["q", "cache.1", "positions", "seqs", "table"], {"chunk": 8, "partials": 3}
    s.op("attend", "attention_partial", given, "o m l", scale=1.0, **cut)
    g = s.fused(["o", "m", "l", "cache.1"], "both", "write attend", Crossing("cache.1", kind, group))
    assert (said(g) == []) == legal


@pytest.mark.parametrize(
    ("kind", "group", "legal"),
    [("local", None, False), ("recompute", None, False), ("last-arriver", "row-head", True), ("cluster", None, True)],
)
def test_the_merge_of_partials(kind, group, legal):
    s = Sketch()
    s.given("q", "bf16", "B", 4, 16)
    s.cached()
    given, cut = ["q", "cache", "positions", "seqs", "table"], {"chunk": 8, "partials": 3}
    s.op("partial", "attention_partial", given, "o m l", scale=1.0, **cut)
    s.op("merge", "attention_merge", ["o", "m", "l", "positions", "seqs"], "a", **cut)
    g = s.fused(["a"], "attention", "partial merge", *(Crossing(v, kind, group) for v in "oml"))
    assert (said(g) == []) == legal


@pytest.mark.parametrize(
    ("kind", "group", "legal"),
    [
        ("local", None, False),
        ("last-arriver", "head", False),
        ("last-arriver", "row", True),
        ("last-arriver", "launch", True),
    ],
)
def test_topk_of_tiled_logits(kind, group, legal):
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.given("seqs", "i32", "B")
    s.weight("w", "f32", 8, 64)
    s.op("router", "router", ["x", "w"], "logits")
    s.op("topk", "topk", ["logits", "seqs"], "ids mix", k=2)
    g = s.fused(["ids", "mix"], "route", "router topk", Crossing("logits", kind, group))
    assert (said(g) == []) == legal


def test_a_row_made_once_is_not_local_to_programs_of_a_tile():
    """The normed row would be evaluated by every program that makes a tile of the sum: that is recompute."""
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.weight("w.row", "f32", 64)
    s.weight("w", "bf16", 64, 64)
    s.op("norm", "norm", ["x", "w.row"], "h", eps=EPS)
    s.op("o", "linear", ["x", "w"], "y")
    s.op("total", "sum", ["h", "y"], "z")
    tile = Crossing("y", "local")
    assert said(s.fused(["z"], "odd", "norm o total", tile, Crossing("h", "recompute"))) == []
    got = said(s.fused(["z"], "odd", "norm o total", tile, Crossing("h", "local")))
    assert got == ["h cannot cross by local: total runs in more programs than norm: that is recompute, not local"]


def test_elementwise_ops_follow_the_tile_they_are_given():
    """A residual add may join the GEMV before it, but then no norm can follow in registers."""
    s = Sketch()
    s.given("a", "bf16", "B", 64)
    s.given("r", "bf16", "B", 64)
    s.weight("w", "bf16", 64, 64)
    s.weight("w.row", "f32", 64)
    s.op("o", "linear", ["a", "w"], "x")
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w.row"], "h", eps=EPS)
    assert said(s.fused(["h", "residual"], "o_add", "o add", Crossing("x", "local"))) == []
    crossings = (Crossing("x", "local"), Crossing("sum", "local"))
    got = said(s.fused(["h", "residual"], "o_add_norm", "o add norm", *crossings))
    assert got == ["sum cannot cross by local: norm needs the row at x; by local it finds the tile"]
