"""Kernels of the elementwise ops, and of residual add and norm, in the interpreter against the reference."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from launches import Maker, interpret
from tolerance import assert_close
from torch import Tensor

from flintc.ir.graph import Graph
from flintc.ir.types import DType
from flintc.reference import run_launch

BATCHES = [1, 3, 8]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def both(graph: Graph, given: Mapping[str, Tensor], batch: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the kernel makes and what the reference makes."""
    (launch,) = graph.launches
    return interpret(graph, given, B=batch), run_launch(graph, launch, given)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [128, 192, 2048])
def test_embed_copies_rows(width: int, batch: int) -> None:
    m = Maker()
    m.op("embed", (m.given("ids", "i32", "B"), m.given("table", "bf16", 512, width, kind="weight")), ("x",))
    given = {
        "ids": torch.tensor([511, 0, 3, 3, 17, 200, 1, 2][:batch], dtype=torch.int32),
        "table": random(512, width).bfloat16(),
    }
    made, want = both(m.graph("x"), given, batch)
    assert torch.equal(made["x"], want["x"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "shape"), [("bf16", (192,)), ("bf16", (6144,)), ("f32", (3, 64)), ("f32", (6, 512))])
def test_silu_mul(dtype: DType, shape: tuple[int, ...], batch: int) -> None:
    """Rows of dense and shared layers (BF16), and rows per expert (FP32), with gates far from zero among them."""
    full = (*shape[:-1], 2 * shape[-1])
    m = Maker()
    m.op("silu_mul", (m.given("x", dtype, "B", *full),), ("y",))
    x = random(batch, *full, scale=3)
    x[0].view(-1)[:4] = torch.tensor([-200.0, 200.0, -20.0, 0.0])
    given = {"x": x.bfloat16() if dtype == "bf16" else x}
    made, want = both(m.graph("y"), given, batch)
    assert_close(made["y"], want["y"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("ranks", "width"), [(3, 128), (6, 2048), (1, 96)])
def test_combine(ranks: int, width: int, batch: int) -> None:
    m = Maker()
    m.op("combine", (m.given("x", "bf16", "B", ranks, width), m.given("w", "f32", "B", ranks)), ("y",))
    given = {"x": random(batch, ranks, width).bfloat16(), "w": random(batch, ranks, seed=1).abs()}
    made, want = both(m.graph("y"), given, batch)
    assert_close(made["y"], want["y"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [128, 2048, 1100])
def test_sum(width: int, batch: int) -> None:
    m = Maker()
    m.op("sum", (m.given("a", "bf16", "B", width), m.given("b", "bf16", "B", width)), ("y",))
    given = {"a": random(batch, width).bfloat16(), "b": random(batch, width, seed=1, scale=100).bfloat16()}
    made, want = both(m.graph("y"), given, batch)
    assert torch.equal(made["y"], want["y"])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", [128, 192, 2048])
@pytest.mark.parametrize("role", ["add", "norm", "add_norm"])
def test_residual_add_and_norm(role: str, width: int, batch: int) -> None:
    m = Maker()
    x = m.given("x", "bf16", "B", width)
    given = {
        "x": random(batch, width).bfloat16(),
        "residual": random(batch, width, seed=1, scale=8).bfloat16(),
        "w": random(width, seed=2),
    }
    if role != "norm":
        x = m.op("add", (x, m.given("residual", "bf16", "B", width)), ("s", "r"))[0]
    if role != "add":
        m.op("norm", (x, m.given("w", "f32", width, kind="weight")), ("y",), eps=1e-6)
    graph = m.graph("y" if role != "add" else "s", "r", role=role)
    made, want = both(graph, given, batch)
    if role != "norm":
        assert torch.equal(made["r"], want["r"])
    if role == "add":
        assert torch.equal(made["s"], want["s"])
    else:
        assert_close(made["y"], want["y"])
