"""The kernels of the routed and shared experts, and of the router, in the interpreter against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from gemv_cases import Data, Inputs, interpret, reference, rows_of
from gemv_graphs import Sizes, chained, expert_down, expert_gate_up, expert_linear, route, router
from launches import only_kernel
from tolerance import assert_close
from torch import Tensor

from flintc.codegen.planner import plan
from flintc.ir.graph import Dependent, Graph
from flintc.ir.types import DType

#: Ragged tiles of rows and of K, two tiles of K for every product.
RAGGED = {
    "bf16": Sizes(hidden=44, experts=8, chosen=3, expert_width=36, shared_width=52),
    "nvfp4": Sizes(hidden=160, experts=5, chosen=2, expert_width=160, shared_width=192),
}
SMALL = RAGGED["bf16"]
#: As many experts as leave no column for the shared one.
MANY = replace(SMALL, experts=12, chosen=8)
FULL = Sizes(experts=8)

#: Formats and batches: every batch in one of them.
CASES = [("bf16", 1), ("bf16", 3), ("bf16", 8), ("nvfp4", 3)]

# Activations of exact values are large; silu of a very negative gate divides by infinity, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def inputs(sizes: Sizes, graph: Graph, batch: int, exact: bool = True, seed: int = 0) -> Inputs:
    """Distinct experts for each row where the graph does not choose them itself."""
    data = Data(batch, seed, exact)
    given = {"ids": data.chosen(sizes.experts, sizes.chosen)} if "ids" not in graph.producers else {}
    if "mix" in graph.values and "mix" not in graph.producers:
        given["mix"] = data.mix(sizes.chosen)
    if "seqs" in graph.values:
        given["seqs"] = torch.arange(batch, dtype=torch.int32)
    return data.inputs(graph, **given)


def both(graph: Graph, given: Inputs, batch: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return interpret(graph, given, B=batch), reference(graph, given)


@pytest.mark.parametrize(("weights", "batch"), CASES)
@pytest.mark.parametrize("own", [False, True], ids=["shared-row", "own-rows"])
@pytest.mark.parametrize("out", ["bf16", "f32"])
def test_expert_linear_of_exact_values_is_exact(own: bool, out: str, weights: DType, batch: int) -> None:
    graph = expert_linear(RAGGED[weights], own, out, weights)
    got, expected = both(graph, inputs(RAGGED[weights], graph, batch), batch)
    assert torch.equal(got["y"], expected["y"])


@pytest.mark.parametrize(("weights", "batch"), CASES)
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_expert_gate_up(shared: bool, weights: DType, batch: int) -> None:
    check_gate_up(RAGGED[weights], shared, batch, weights)


@pytest.mark.parametrize("shared_width", [8, 36, 300])
def test_shared_expert_of_any_width(shared_width: int) -> None:
    """Fewer, as many and many more columns than an expert."""
    sizes = replace(SMALL, shared_width=shared_width)
    check_gate_up(sizes, True, 3)
    check_down(sizes, True, 3)


@pytest.mark.parametrize(("weights", "batch"), CASES)
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_expert_down(shared: bool, weights: DType, batch: int) -> None:
    check_down(RAGGED[weights], shared, batch, weights)


#: Hidden size, widths of an expert and of the shared one: NVFP4 down weights in blocks are both, one or the other,
#: neither; none, since their rows are no whole groups.
DOWN_BLOCKS = [(256, 128, 384), (256, 64, 128), (256, 128, 192), (256, 64, 96), (40, 128, 256)]
#: The same of gate and up: both, the shared one, the routed one.
UP_BLOCKS = [(256, 64, 96), (256, 36, 64), (256, 64, 36)]


@pytest.mark.parametrize(("hidden", "expert_width", "shared_width"), DOWN_BLOCKS)
def test_expert_down_in_blocks(hidden: int, expert_width: int, shared_width: int) -> None:
    """Parts of the shared expert's rows may begin within a block."""
    sizes = Sizes(hidden=hidden, experts=5, chosen=2, expert_width=expert_width, shared_width=shared_width)
    check_down(sizes, True, 3, "nvfp4")


@pytest.mark.parametrize(("hidden", "expert_width", "shared_width"), UP_BLOCKS)
def test_expert_gate_up_in_blocks(hidden: int, expert_width: int, shared_width: int) -> None:
    sizes = Sizes(hidden=hidden, experts=5, chosen=2, expert_width=expert_width, shared_width=shared_width)
    check_gate_up(sizes, True, 3, "nvfp4")


def test_expert_down_of_more_products_than_eight_columns() -> None:
    check_down(MANY, shared=False, batch=1)
    check_down(MANY, shared=True, batch=3)


def check_gate_up(sizes: Sizes, shared: bool, batch: int, weights: DType = "bf16") -> None:
    graph = expert_gate_up(sizes, shared, weights)
    got, expected = both(graph, inputs(sizes, graph, batch), batch)
    for name in graph.outputs:
        assert_close(got[name], expected[name])


def check_down(sizes: Sizes, shared: bool, batch: int, weights: DType = "bf16") -> None:
    graph = expert_down(sizes, shared, weights)
    got, expected = both(graph, inputs(sizes, graph, batch), batch)
    (output,) = graph.outputs
    assert_close(got[output], expected[output])


#: Sizes at which a vector is cut into as many slices as can be.
CUT = Sizes(hidden=512, experts=8, chosen=3, expert_width=256, shared_width=256)
#: The same of NVFP4: the shared expert's sums of several rows are made in halves.
HALVES = replace(CUT, hidden=1024)


@pytest.mark.parametrize(("sizes", "weights"), [(SMALL, "bf16"), (CUT, "bf16"), (CUT, "nvfp4"), (HALVES, "nvfp4")])
def test_a_row_is_the_same_alone_and_in_a_batch(sizes: Sizes, weights: DType) -> None:
    for graph in (expert_gate_up(sizes, True, weights), expert_down(sizes, True, weights), route(sizes, True)):
        given = inputs(sizes, graph, 8, exact=False)
        together = interpret(graph, given, B=8)
        for row in (0, 5):
            alone = interpret(graph, rows_of(given, graph, row), B=1)
            for name in graph.outputs:
                assert torch.equal(alone[name][0], together[name][row])


def test_what_differs_between_one_row_and_several_rows_of_gate_and_up() -> None:
    planned = plan(expert_gate_up(HALVES, True, "nvfp4"))
    one, several = (planned.kernel_for(planned.launches[0], n).source for n in (1, 8))
    assert "accumulate_halves" in several and "accumulate_halves" not in one
    assert "send_for" in one and "send_for" not in several


def ahead(graph: Graph) -> Graph:
    """The same launch, which fetches everything but x above its wait in steps of one row."""
    (launch,) = graph.launches
    alone = Dependent(tuple(v for v in graph.reads(launch) if v not in ("x", "shared_x")))
    return graph.with_launches((replace(launch, dependent=Dependent((), alone=alone)),))


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("width", [32, 128, 512, 1024, 2048])
def test_down_of_one_row_adds_as_that_of_several(width: int, weights: DType) -> None:
    """More of K at a time leaves each sum its units only where these are shared out in turn."""
    planned = plan(ahead(expert_down(replace(FULL, expert_width=width), True, weights)))
    one, several = (planned.kernel_for(planned.launches[0], rows).constants for rows in (1, 8))
    assert one["CHAINS"] == several["CHAINS"]
    assert weights == "bf16" or one["STEPS"] == several["STEPS"]


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_down_with_all_of_k_on_its_way(weights: DType) -> None:
    sizes = replace(FULL, hidden=48)
    graph = ahead(expert_down(sizes, True, weights))
    for batch in (1, 3):
        got, expected = both(graph, inputs(sizes, graph, batch), batch)
        assert_close(got["total"], expected["total"])


PADDED = [1, 3]
LIVE = [0, 2]


def without_experts(given: Inputs) -> Inputs:
    """``given`` with the rows PADDED of no sequence, or where they have been routed already, of no expert."""
    name = "seqs" if "seqs" in given else "ids"
    changed = given[name].clone()
    changed[PADDED] = -1
    return {**given, name: changed}


@pytest.mark.parametrize("weights", RAGGED)
@pytest.mark.parametrize("own", [False, True], ids=["shared-row", "own-rows"])
def test_expert_linear_of_padded_rows_is_zero(own: bool, weights: DType) -> None:
    check_padded(expert_linear(RAGGED[weights], own, weights=weights), RAGGED[weights], zero=("y",))


@pytest.mark.parametrize("weights", RAGGED)
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
def test_gate_up_and_down_of_padded_rows(shared: bool, weights: DType) -> None:
    """The shared expert's activation is made for every row; down leaves a padded row at zero even so."""
    check_padded(expert_gate_up(RAGGED[weights], shared, weights), RAGGED[weights], zero=("act",))
    graph = expert_down(RAGGED[weights], shared, weights)
    check_padded(graph, RAGGED[weights], zero=graph.outputs)


@pytest.mark.parametrize("add", [False, True], ids=["norm", "add+norm"])
def test_route_of_padded_rows_chooses_no_expert(add: bool) -> None:
    got = check_padded(route(SMALL, add), SMALL, zero=("mix",))
    assert (got["ids"][PADDED] == -1).all()


def check_padded(graph: Graph, sizes: Sizes, zero: Sequence[str]) -> dict[str, Tensor]:
    """Padded rows get zeros as the reference has them, the rows between them the bits that they always get."""
    given = inputs(sizes, graph, 4, exact=False)
    everything = interpret(chained(graph, 16), given, B=4)
    got, expected = both(chained(graph, 16), without_experts(given), 4)
    for name in graph.outputs:
        assert torch.equal(got[name][LIVE], everything[name][LIVE])
        if name in zero:
            assert (got[name][PADDED] == 0).all()
        else:
            assert_close(got[name].float(), expected[name].float())
    return got


@pytest.mark.parametrize("weights", RAGGED)
def test_a_program_of_a_padded_row_reads_no_weight_below_its_wait(weights: DType) -> None:
    """By its source: after the wait it reads its row's ids, stores and leaves."""
    sizes = RAGGED[weights]
    for graph, output in (
        (expert_linear(sizes, own=True, weights=weights), "y_ptr"),
        (expert_gate_up(sizes, shared=True, weights=weights), "act_ptr"),
        (expert_down(sizes, shared=True, weights=weights), "y_ptr"),
    ):
        below = []
        for path in only_kernel(chained(graph, 16)).paths:
            kinds = [effect.kind for effect in path]
            assert kinds.count("wait") == 1
            below.append([(e.kind, e.param) for e in path[kinds.index("wait") + 1 :]])
        assert [("read", "ids_ptr"), ("write", output)] in below


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_router(batch: int) -> None:
    graph = router(replace(SMALL, experts=10))
    got, expected = both(graph, Data(batch, exact=True).inputs(graph), batch)
    assert torch.equal(got["logits"], expected["logits"])


@pytest.mark.parametrize("add", [False, True], ids=["norm", "add+norm"])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_route(add: bool, score: str, batch: int) -> None:
    graph = route(replace(SMALL, experts=10), add, score)
    got, expected = both(graph, inputs(SMALL, graph, batch, exact=False), batch)
    check_route(got, expected)
    if add:
        assert torch.equal(got["residual.1"], expected["residual.1"])


def check_route(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Logits to the rounding of an FP32 sum; no two experts of the data are closer than that."""
    assert_close(got["h"], expected["h"])
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    assert torch.equal(got["ids"], expected["ids"])
    torch.testing.assert_close(got["mix"], expected["mix"], rtol=1e-5, atol=1e-6)


def test_equal_logits_choose_the_lower_expert() -> None:
    graph = route(SMALL, add=False)
    given = inputs(SMALL, graph, 1)
    given["w"] = torch.ones(SMALL.experts, SMALL.hidden)
    got = interpret(graph, given, B=1)
    assert got["ids"].tolist() == [[0, 1, 2]]
    assert got["mix"].unique().numel() == 1


def test_route_at_full_width() -> None:
    sizes = Sizes(experts=256)
    graph = chained(route(sizes, add=True), 4)
    got, expected = both(graph, inputs(sizes, graph, 3, exact=False), 3)
    check_route(got, expected)


@pytest.mark.parametrize("weights", RAGGED)
def test_experts_at_full_width(weights: DType) -> None:
    for graph in (expert_gate_up(FULL, True, weights), expert_down(FULL, True, weights)):
        got, expected = both(chained(graph, 16), inputs(FULL, graph, 1), 1)
        for name in graph.outputs:
            assert_close(got[name], expected[name])
