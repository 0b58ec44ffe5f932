"""Graphs of one launch for every role with a matrix-vector product, at any size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launches import Maker

from flintc.ir.graph import Dependent, Graph
from flintc.ir.types import DType


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model's matrix products."""

    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    dense_width: int = 6144
    experts: int = 8
    chosen: int = 6
    expert_width: int = 512
    shared_width: int = 1024
    page: int = 64
    window: int = 513


def chained(graph: Graph, tile: int | None = None) -> Graph:
    """The same launches, chained: every weight and table is read above the wait, save the chosen experts'."""
    launches = []
    for launch in graph.launches:
        chosen = {graph.ops[o].inputs[-1] for o in launch.ops if graph.ops[o].kind == "expert_linear"}
        fetched = (v for v in graph.reads(launch) if graph.values[v].kind in ("weight", "table") and v not in chosen)
        launches.append(replace(launch, tile=tile, dependent=Dependent(tuple(fetched))))
    return graph.with_launches(tuple(launches))


def linear(n: int, k: int, out: str = "bf16", weights: DType = "bf16") -> Graph:
    """``linear``: y = x w."""
    m = Maker()
    x = m.given("x", "bf16", "B", k)
    w = m.given("w", weights, n, k, kind="weight")
    m.op("linear", (x, w), ("y",), out=out)
    return m.graph("y")


def gate_up(s: Sizes, weights: DType = "bf16") -> Graph:
    """``gate_up``: a dense MLP's first half."""
    m = Maker()
    x = m.given("x", "bf16", "B", s.hidden)
    w = m.given("w", weights, 2 * s.dense_width, s.hidden, kind="weight")
    m.op("linear", (x, w), ("gate_up",))
    m.op("silu_mul", ("gate_up",), ("act",))
    return m.graph("act", role="gate_up")


def qkv(s: Sizes, rotate: bool, weights: DType = "bf16") -> Graph:
    """``qkv``: a windowed, rotated layer, or one that sees the whole context."""
    m = Maker()
    heads = s.heads + 2 * s.kv_heads
    x = m.given("x", "bf16", "B", s.hidden)
    w = m.given("w", weights, heads * s.head_dim, s.hidden, kind="weight")
    gains = [m.given(name, "f32", s.head_dim, kind="weight") for name in ("q_norm", "k_norm")]
    at = [m.given(name, "i32", "B") for name in ("positions", "seqs")]
    window = s.window if rotate else None
    ring = -(-(s.window - 1 + 8) // s.page)
    table = m.given("block_table", "i32", "Q", ring if rotate else "T")
    cache = m.given("cache", "bf16", "P", 2, s.kv_heads, s.page, s.head_dim, kind="cache")
    m.op("linear", (x, w), ("qkv",), heads=heads)
    m.op("head_norm", ("qkv", gains[0]), ("q",), heads=(0, s.heads), eps=1e-6)
    m.op("head_norm", ("qkv", gains[1]), ("k",), heads=(s.heads, s.kv_heads), eps=1e-6)
    q, k = "q", "k"
    if rotate:
        angles = m.given("rope_table", "f32", "C", 2, s.head_dim // 2, kind="table")
        q, k = m.op("rope", ("q", "k", "positions", angles), ("q.1", "k.1"))
    v_heads = (s.heads + s.kv_heads, s.kv_heads)
    m.op("kv_write", (k, "qkv", cache, *at, table), ("cache.1",), v_heads=v_heads, window=window)
    return m.graph(q, "cache.1", role="qkv")


def expert_linear(s: Sizes, own: bool, out: str = "bf16", weights: DType = "bf16") -> Graph:
    """``expert_linear``: gate and up from a shared row, or down from each expert's own."""
    m = Maker()
    n, k = (s.hidden, s.expert_width) if own else (2 * s.expert_width, s.hidden)
    x = m.given("x", "bf16", "B", s.chosen, k) if own else m.given("x", "bf16", "B", k)
    ids = m.given("ids", "i32", "B", s.chosen)
    w = m.given("w", weights, s.experts, n, k, kind="weight")
    m.op("expert_linear", (x, ids, w), ("y",), out=out)
    return m.graph("y")


def expert_gate_up(s: Sizes, shared: bool, weights: DType = "bf16") -> Graph:
    """``expert_gate_up``, with or without a shared expert."""
    m = Maker()
    x = m.given("x", "bf16", "B", s.hidden)
    ids = m.given("ids", "i32", "B", s.chosen)
    w = m.given("w", weights, s.experts, 2 * s.expert_width, s.hidden, kind="weight")
    m.op("expert_linear", (x, ids, w), ("gate_up",), out="f32")
    m.op("silu_mul", ("gate_up",), ("act",))
    if not shared:
        return m.graph("act", role="expert_gate_up")
    w = m.given("shared_w", weights, 2 * s.shared_width, s.hidden, kind="weight")
    m.op("linear", (x, w), ("shared_gate_up",))
    m.op("silu_mul", ("shared_gate_up",), ("shared_act",))
    return m.graph("act", "shared_act", role="expert_gate_up")


def expert_down(s: Sizes, shared: bool, weights: DType = "bf16") -> Graph:
    """``expert_down``, with or without a shared expert."""
    m = Maker()
    x = m.given("x", "bf16", "B", s.chosen, s.expert_width)
    ids = m.given("ids", "i32", "B", s.chosen)
    mix = m.given("mix", "f32", "B", s.chosen)
    w = m.given("w", weights, s.experts, s.hidden, s.expert_width, kind="weight")
    m.op("expert_linear", (x, ids, w), ("y",))
    m.op("combine", ("y", mix), ("routed",))
    if not shared:
        return m.graph("routed", role="expert_down")
    x = m.given("shared_x", "bf16", "B", s.shared_width)
    w = m.given("shared_w", weights, s.hidden, s.shared_width, kind="weight")
    m.op("linear", (x, w), ("shared",))
    m.op("sum", ("routed", "shared"), ("total",))
    return m.graph("total", role="expert_down")


def router(s: Sizes) -> Graph:
    """``router`` alone."""
    m = Maker()
    h = m.given("h", "bf16", "B", s.hidden)
    w = m.given("w", "f32", s.experts, s.hidden, kind="weight")
    m.op("router", (h, w), ("logits",))
    return m.graph("logits")


def route(s: Sizes, add: bool, score: str = "sigmoid", renormalize: bool = True) -> Graph:
    """``route``: [add +] norm, router, top-k."""
    m = Maker()
    x = m.given("x", "bf16", "B", s.hidden)
    outputs = ["h", "ids", "mix"]
    if add:
        residual = m.given("residual", "bf16", "B", s.hidden)
        x, _ = m.op("add", (x, residual), ("sum", "residual.1"))
        outputs.append("residual.1")
    gain = m.given("gain", "f32", s.hidden, kind="weight")
    m.op("norm", (x, gain), ("h",), eps=1e-6)
    w = m.given("w", "f32", s.experts, s.hidden, kind="weight")
    m.op("router", ("h", w), ("logits",))
    seqs = m.given("seqs", "i32", "B")
    m.op("topk", ("logits", seqs), ("ids", "mix"), k=s.chosen, score=score, renormalize=renormalize)
    return m.graph(*outputs, role="route")
