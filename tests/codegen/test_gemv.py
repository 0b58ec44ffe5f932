"""Dense matrix-vector kernels in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from gemv_cases import Data, interpret, reference, rows_of
from gemv_graphs import Sizes, chained, gate_up, linear
from launches import only_kernel
from tolerance import assert_close

from flintc.codegen.families.gemv import walk
from flintc.errors import VerificationError

#: (output rows, K): a ragged tile of both, two tiles of K, one step of K, fewer columns than a step.
SHAPES = [(40, 100), (48, 320), (16, 128), (5, 24)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_linear_of_exact_values_is_exact(n: int, k: int, out: str, batch: int) -> None:
    """No order of the sum rounds anything: the kernel owes the reference's bits."""
    graph = linear(n, k, out)
    given = Data(batch, exact=True).inputs(graph)
    assert torch.equal(interpret(graph, given, B=batch)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_linear(batch: int) -> None:
    graph = linear(72, 1100)
    given = Data(batch).inputs(graph)
    assert_close(interpret(graph, given, B=batch)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_every_tile_gives_the_same_product(tile: int) -> None:
    graph = chained(linear(150, 600, "f32"), tile)
    given = Data(3, exact=True).inputs(graph)
    assert torch.equal(interpret(graph, given, B=3)["y"], reference(graph, given)["y"])


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    graph = linear(48, 700, "f32")
    given = Data(8).inputs(graph)
    together = interpret(graph, given, B=8)["y"]
    for row in (0, 3, 7):
        alone = interpret(graph, rows_of(given, graph, row), B=1)["y"]
        assert torch.equal(alone[0], together[row])


def test_tile_that_is_no_multiple_of_sixteen_is_refused() -> None:
    with pytest.raises(VerificationError, match="24 rows"):
        only_kernel(chained(linear(48, 64), 24))


def test_walk_fills_the_registers_once() -> None:
    """K of one tile at the sizes of Flint: 64 registers of weights in each of 256 threads."""
    assert [walk(16, k).block for k in (512, 1024, 2048, 4096, 6144)] == [512, 1024, 2048, 2048, 2048]
    assert walk(64, 2048).block == 512
    for tile, k in ((16, 512), (16, 4096), (64, 2048), (32, 700), (16, 33)):
        shape = walk(tile, k)
        assert tile // 8 * shape.chains * shape.steps <= 16
        assert shape.block <= max(k, 32)


def test_linear_at_full_width() -> None:
    for n, k in ((2048, 4096), (2048, 6144)):
        graph = chained(linear(n, k), 16)
        given = Data(3).inputs(graph)
        assert_close(interpret(graph, given, B=3)["y"], reference(graph, given)["y"])


def test_head_of_full_width_and_a_ragged_tile() -> None:
    graph = chained(linear(2600, 2048, "f32"), 64)
    given = Data(1, exact=True).inputs(graph)
    assert torch.equal(interpret(graph, given, B=1)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("width", [192, 100, 7])
def test_gate_up(batch: int, width: int) -> None:
    graph = gate_up(Sizes(hidden=160, dense_width=width))
    given = Data(batch, exact=True).inputs(graph)
    assert_close(interpret(graph, given, B=batch)["act"], reference(graph, given)["act"])


def test_gate_up_at_full_width() -> None:
    graph = chained(gate_up(Sizes()), 16)
    given = Data(1, exact=True).inputs(graph)
    assert_close(interpret(graph, given, B=1)["act"], reference(graph, given)["act"])
