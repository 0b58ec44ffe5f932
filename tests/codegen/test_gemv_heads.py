"""The qkv kernel in the interpreter against the reference: product, q/k norm, rotation, cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemv_cases import Data, Inputs, interpret, reference, rows_of
from gemv_graphs import Sizes, chained, qkv
from launches import only_kernel
from tolerance import assert_close
from torch import Tensor

from flintc.errors import UsageError
from flintc.ir.graph import Graph
from flintc.ir.types import DType
from flintc.reference import rope_table

SMALL = Sizes(hidden=160, heads=4, kv_heads=2, head_dim=32, page=8, window=13)
POSITIONS = (12, 13, 0, 14, 40, 41, 42, 7)
SEQS = (0, 1, 2, -1, 3, 3, 3, 4)


def inputs(sizes: Sizes, graph: Graph, batch: int, exact: bool = True) -> Inputs:
    """Rows of several sequences, one of them padded, and a cache that nothing has been written to."""
    data = Data(batch, exact=exact)
    columns = graph.values["block_table"].type.shape[1]
    columns = columns if isinstance(columns, int) else max(POSITIONS) // sizes.page + 2
    table = torch.randperm(5 * columns, generator=data.random).view(5, columns).int()
    given = {
        "positions": torch.tensor(POSITIONS[:batch]).int(),
        "seqs": torch.tensor(SEQS[:batch]).int(),
        "block_table": table,
        "cache": torch.full((5 * columns, 2, sizes.kv_heads, sizes.page, sizes.head_dim), torch.nan).bfloat16(),
    }
    if "rope_table" in graph.values:
        given["rope_table"] = rope_table(64, sizes.head_dim, 10_000.0)
    return data.inputs(graph, **given)


def run(graph: Graph, given: Inputs) -> dict[str, Tensor]:
    table = given["block_table"]
    return interpret(graph, given, B=given["positions"].shape[0], T=table.shape[1])


def check(sizes: Sizes, rotate: bool, batch: int, weights: DType = "bf16") -> None:
    """Queries, and the whole cache: slots that no row owns stay unwritten."""
    graph = qkv(sizes, rotate, weights)
    given = inputs(sizes, graph, batch)
    got, expected = run(graph, given), reference(graph, given)
    query = "q.1" if rotate else "q"
    assert_close(got[query], expected[query], roundings=2)
    written = ~expected["cache.1"].isnan()
    assert torch.equal(~got["cache.1"].isnan(), written)
    assert_close(got["cache.1"].nan_to_num(), expected["cache.1"].nan_to_num(), roundings=2)


@pytest.mark.parametrize("rotate", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_qkv(rotate: bool, batch: int) -> None:
    check(SMALL, rotate, batch)


def test_a_head_begins_with_a_group_of_rows_where_weights_lie_in_blocks() -> None:
    sizes = Sizes(hidden=128, heads=4, kv_heads=2, head_dim=12, page=8, window=13)
    with pytest.raises(UsageError, match="heads of 12 channels are no multiple of 8"):
        only_kernel(qkv(sizes, True, "nvfp4"))


def test_qkv_of_packed_weights() -> None:
    check(SMALL, rotate=True, batch=3, weights="nvfp4")
    check(replace(SMALL, hidden=256), rotate=True, batch=3, weights="nvfp4")  # in blocks


@pytest.mark.parametrize("head_dim", [8, 24, 40])
def test_heads_that_no_tile_divides(head_dim: int) -> None:
    check(Sizes(hidden=96, heads=3, kv_heads=1, head_dim=head_dim, page=8, window=13), True, 3)


def test_values_are_stored_as_the_product_rounds_them() -> None:
    """No norm, no rotation: bits equal the reference's."""
    graph = qkv(SMALL, rotate=True)
    given = inputs(SMALL, graph, 8)
    got, expected = run(graph, given)["cache.1"], reference(graph, given)["cache.1"]
    assert torch.equal(got[:, 1].nan_to_num(), expected[:, 1].nan_to_num())


@pytest.mark.parametrize("hidden", [SMALL.hidden, 1024])
def test_a_row_is_the_same_alone_and_in_a_batch(hidden: int) -> None:
    sizes = replace(SMALL, hidden=hidden)
    graph = qkv(sizes, rotate=True)
    given = inputs(sizes, graph, 8, exact=False)
    together = run(graph, given)["q.1"]
    for row in (0, 3, 7):
        assert torch.equal(run(graph, rows_of(given, graph, row))["q.1"][0], together[row])


def test_qkv_at_full_width() -> None:
    sizes = Sizes()
    graph = chained(qkv(sizes, rotate=True), 16)
    given = inputs(sizes, graph, 3)
    got, expected = run(graph, given), reference(graph, given)
    assert_close(got["q.1"], expected["q.1"], roundings=2)
    assert_close(got["cache.1"].nan_to_num(), expected["cache.1"].nan_to_num(), roundings=2)
