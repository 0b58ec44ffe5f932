"""Kernels of the norm of heads, their rotation and the cache write, in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from launches import Maker, interpret
from tolerance import assert_close
from torch import Tensor

from flintc.ir.graph import Graph
from flintc.reference import rope_table, run_launch

#: Rows, query heads, KV heads, channels per head; the last is Flint's.
SIZES = [(1, 4, 2, 32), (3, 4, 2, 32), (8, 4, 2, 32), (19, 3, 1, 24), (2, 32, 4, 128)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(graph: Graph, given: dict[str, Tensor]) -> dict[str, Tensor]:
    (launch,) = graph.launches
    return run_launch(graph, launch, given)


def norm_graph(heads: int, head: int, first: int, count: int) -> Graph:
    m = Maker()
    reads = (m.given("x", "bf16", "B", heads, head), m.given("w", "f32", head, kind="weight"))
    m.op("head_norm", reads, ("y",), eps=1e-6, heads=(first, count))
    return m.graph("y")


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "head"), SIZES)
def test_head_norm(batch: int, heads: int, kv_heads: int, head: int) -> None:
    """Both spans that a layer norms, rows of very different size among them."""
    total = heads + 2 * kv_heads
    x = random(batch, total, head) * torch.logspace(-3, 3, batch)[:, None, None]
    given = {"x": x.bfloat16(), "w": random(head, seed=1)}
    for first, count in ((0, heads), (heads, kv_heads)):
        graph = norm_graph(total, head, first, count)
        y = interpret(graph, given, B=batch)["y"]
        assert_close(y, reference(graph, given)["y"])
        alone = {**given, "x": given["x"][-1:]}
        assert torch.equal(interpret(graph, alone, B=1)["y"], y[-1:])


def test_head_norm_of_zeros_is_zero() -> None:
    given = {"x": torch.zeros(1, 4, 32, dtype=torch.bfloat16), "w": torch.ones(32)}
    assert not interpret(norm_graph(4, 32, 0, 4), given, B=1)["y"].any()


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "head"), SIZES)
def test_rope(batch: int, heads: int, kv_heads: int, head: int) -> None:
    m = Maker()
    m.given("q", "bf16", "B", heads, head)
    m.given("k", "bf16", "B", kv_heads, head)
    m.given("positions", "i32", "B")
    m.given("table", "f32", "C", 2, head // 2, kind="table")
    m.op("rope", ("q", "k", "positions", "table"), ("q.1", "k.1"))
    graph = m.graph("q.1", "k.1")
    given = {
        "q": random(batch, heads, head).bfloat16(),
        "k": random(batch, kv_heads, head, seed=1).bfloat16(),
        "positions": torch.tensor([0, 1, 512, 513, 7, 1000, 40, 3, *range(11)][:batch], dtype=torch.int32),
        "table": rope_table(1024, head, 10000.0),
    }
    made, want = interpret(graph, given, B=batch), reference(graph, given)
    for name in ("q.1", "k.1"):
        assert_close(made[name], want[name])
    # Position 0 turns nothing.
    assert torch.equal(made["q.1"][0], given["q"][0])


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("batch", [1, 3, 8, 19])
def test_kv_write(window: int | None, batch: int) -> None:
    """Each row's key and value land at its position, through the ring under a window; nothing else changes."""
    heads, kv_heads, head, page, ring = 4, 2, 32, 8, 3
    columns = 8 if window is None else ring
    seqs = [2, 0, 2, -1, 1, 1, 0, -1, 3, *([4] * 10)][:batch]
    positions = [50, 0, 51, 0, 23, 24, 63, 0, 7, *range(30, 40)][:batch]
    m = Maker()
    m.given("k", "bf16", "B", kv_heads, head)
    m.given("v", "bf16", "B", heads + 2 * kv_heads, head)
    m.given("cache", "bf16", "P", 2, kv_heads, page, head, kind="cache")
    m.given("positions", "i32", "B")
    m.given("seqs", "i32", "B")
    m.given("table", "i32", "Q", "T" if window is None else ring)
    reads = ("k", "v", "cache", "positions", "seqs", "table")
    m.op("kv_write", reads, ("cache.1",), v_heads=(heads + kv_heads, kv_heads), window=window)
    graph = m.graph("cache.1")
    pages = torch.randperm(50, generator=torch.Generator().manual_seed(0)).int()
    given = {
        "k": random(batch, kv_heads, head).bfloat16(),
        "v": random(batch, heads + 2 * kv_heads, head, seed=1).bfloat16(),
        "cache": torch.full((50, 2, kv_heads, page, head), torch.nan, dtype=torch.bfloat16),
        "positions": torch.tensor(positions, dtype=torch.int32),
        "seqs": torch.tensor(seqs, dtype=torch.int32),
        "table": pages[: 5 * columns].view(5, columns),
    }
    want = reference(graph, {**given, "cache": given["cache"].clone()})["cache.1"]
    interpret(graph, given, B=batch, P=50, Q=5, T=columns)
    assert torch.equal(given["cache"].view(torch.int16), want.view(torch.int16))
    live = sum(s >= 0 for s in seqs)
    assert int((~want.isnan()).sum()) == live * 2 * kv_heads * head
