"""Dense matrix-vector kernels in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from gemv_cases import Data, interpret, reference, rows_of
from gemv_graphs import Sizes, chained, gate_up, linear
from launches import only_kernel
from tolerance import assert_close

from flintc.codegen.families.gemv import BF16, NVFP4, Format, walk
from flintc.codegen.planner import plan
from flintc.errors import UsageError, VerificationError
from flintc.ir.types import DType

# Activations of exact values are large; silu of a very negative gate divides by infinity, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

#: (output rows, K): a ragged tile of both, two tiles of K, one step of K, fewer columns than a step; packed ones in
#: blocks: one tile of K, two and a part.
SHAPES = {
    "bf16": [(40, 100), (48, 320), (16, 128), (5, 24)],
    "nvfp4": [(40, 160), (48, 1184), (16, 512), (5, 32), (48, 1152)],
}
CASES = [(weights, n, k) for weights, shapes in SHAPES.items() for n, k in shapes]


@pytest.mark.parametrize(("weights", "n", "k"), CASES)
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_linear_of_exact_values_is_exact(weights: DType, n: int, k: int, out: str, batch: int) -> None:
    """No order of the sum rounds anything: the kernel owes the reference's bits."""
    graph = linear(n, k, out, weights)
    given = Data(batch, exact=True).inputs(graph)
    assert torch.equal(interpret(graph, given, B=batch)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("weights", SHAPES)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_linear(weights: DType, batch: int) -> None:
    graph = linear(72, 1120, weights=weights)
    given = Data(batch).inputs(graph)
    assert_close(interpret(graph, given, B=batch)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("weights", SHAPES)
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_every_tile_gives_the_same_product(tile: int, weights: DType) -> None:
    graph = chained(linear(150, 608, "f32", weights), tile)
    given = Data(3, exact=True).inputs(graph)
    assert torch.equal(interpret(graph, given, B=3)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("weights", SHAPES)
@pytest.mark.parametrize("k", [32, 704, 2048, 4096])
def test_a_row_is_the_same_alone_and_in_a_batch(k: int, weights: DType) -> None:
    """Alone it is cut into slices, one for each sum of a warp; in a batch it has a column of its own."""
    graph = linear(48, k, "f32", weights)
    given = Data(8).inputs(graph)
    together = interpret(graph, given, B=8)["y"]
    for row in (0, 3, 7):
        alone = interpret(graph, rows_of(given, graph, row), B=1)["y"]
        assert torch.equal(alone[0], together[row])
    planned = plan(graph)
    one, several = (planned.kernel_for(planned.launches[0], rows) for rows in (1, 8))
    assert (one.name == several.name) == (one.constants["CHAINS"] == 1)
    assert one.constants == several.constants


def test_tile_that_is_no_multiple_of_sixteen_is_refused() -> None:
    with pytest.raises(VerificationError, match="24 rows"):
        only_kernel(chained(linear(48, 64), 24))


def test_packed_rows_that_end_within_a_load_are_refused() -> None:
    with pytest.raises(UsageError, match="a multiple of 32"):
        only_kernel(linear(16, 48, weights="nvfp4"))


def test_walk_at_the_sizes_of_flint() -> None:
    """K of one tile: all of it, or a whole number of tiles, and nothing masked."""
    assert [walk(16, k).block for k in (512, 1024, 2048, 4096, 6144)] == [512, 1024, 2048, 2048, 2048]
    assert [walk(16, k, NVFP4).block for k in (512, 1024, 2048, 4096, 6144)] == [512, 1024, 2048, 4096, 2048]
    assert walk(64, 2048).block == 256
    assert walk(64, 2048, NVFP4).block == 512


@pytest.mark.parametrize("format", [BF16, NVFP4], ids=["bf16", "nvfp4"])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_walk_stays_within_registers_and_k(tile: int, format: Format) -> None:
    for k in (1, 33, 512, 700, 4096, 6144):
        shape = walk(tile, k, format)
        assert tile // 8 * shape.steps <= format.loads
        assert shape.block <= max(k, format.step)


def test_linear_at_full_width() -> None:
    for k, weights in ((4096, "bf16"), (6144, "nvfp4")):
        graph = chained(linear(2048, k, weights=weights), 16)
        given = Data(3).inputs(graph)
        assert_close(interpret(graph, given, B=3)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("weights", SHAPES)
def test_head_of_full_width_and_a_ragged_tile(weights: DType) -> None:
    """Rows are of full width, tiles those of the head; of its 150,144 rows 2,600, since all of them would take the
    interpreter over a minute. Programs differ by their first row alone, and `test_gemv_aot` compiles the whole head.
    """
    graph = chained(linear(2600, 2048, "f32", weights), 64)
    given = Data(1, exact=True).inputs(graph)
    assert torch.equal(interpret(graph, given, B=1)["y"], reference(graph, given)["y"])


@pytest.mark.parametrize("weights", SHAPES)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("width", [192, 100, 7])
def test_gate_up(width: int, batch: int, weights: DType) -> None:
    graph = gate_up(Sizes(hidden=160, dense_width=width), weights)
    given = Data(batch, exact=True).inputs(graph)
    assert_close(interpret(graph, given, B=batch)["act"], reference(graph, given)["act"])


def test_gate_up_at_full_width() -> None:
    graph = chained(gate_up(Sizes()), 16)
    given = Data(1, exact=True).inputs(graph)
    assert_close(interpret(graph, given, B=1)["act"], reference(graph, given)["act"])
