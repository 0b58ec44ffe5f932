"""The choice of experts in the interpreter against the reference, and where sorting is easily got wrong."""

from __future__ import annotations

import pytest
import torch
from launches import Maker, interpret
from torch import Tensor

from flintc.ir.graph import Graph
from flintc.reference import run_launch

# A sigmoid of a very negative logit divides by infinity, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def topk(experts: int, k: int, score: str = "sigmoid", renormalize: bool = True) -> Graph:
    """``topk`` alone."""
    m = Maker()
    inputs = m.given("logits", "f32", "B", experts), m.given("seqs", "i32", "B")
    m.op("topk", inputs, ("ids", "w"), k=k, score=score, renormalize=renormalize)
    return m.graph("ids", "w")


def choose(
    logits: Tensor, k: int, score: str = "sigmoid", renormalize: bool = True, seqs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Kernel's ids and weights, ids equal to the reference's and weights within a few FP32 steps of it."""
    batch, experts = logits.shape
    graph = topk(experts, k, score, renormalize)
    given = {"logits": logits, "seqs": torch.arange(batch, dtype=torch.int32) if seqs is None else seqs}
    made = interpret(graph, given, B=batch)
    want = run_launch(graph, graph.launches[0], given)
    assert torch.equal(made["ids"], want["ids"])
    # The order of a sum of k (softmax: all) FP32 terms, an exponential and two divisions.
    torch.testing.assert_close(made["w"], want["w"], rtol=(8 + k + experts) * 2.0**-24, atol=0)
    return made["ids"], made["w"]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize(("experts", "k"), [(8, 3), (256, 6), (100, 5), (1, 1), (6, 6)])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_random_logits(experts: int, k: int, batch: int, score: str, renormalize: bool) -> None:
    logits = torch.randn(batch, experts, generator=torch.Generator().manual_seed(experts)) * 4
    choose(logits, k, score, renormalize)


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros(1, 256)
    logits[0, 200:] = 1.0
    assert choose(logits, 6)[0].tolist() == [[200, 201, 202, 203, 204, 205]]


def test_negative_zero_equals_zero() -> None:
    logits = torch.full((1, 8), -1.0)
    logits[0, 2], logits[0, 5] = -0.0, 0.0
    assert choose(logits, 2)[0].tolist() == [[2, 5]]


def test_order_is_of_the_logits_where_the_sigmoid_saturates() -> None:
    """Above 17 every sigmoid is 1.0; the larger logit is still the better."""
    logits = torch.tensor([[18.0, 30.0, 25.0, 90.0]])
    ids, weights = choose(logits, 3)
    assert ids.tolist() == [[3, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


def test_all_negative_logits_and_no_expert_past_the_last() -> None:
    """100 experts are padded to 128: padding must not win over very negative logits."""
    logits = torch.full((1, 100), -3e38)
    logits[0, 99] = -torch.inf
    assert choose(logits, 3)[0].tolist() == [[0, 1, 2]]


def test_weights_when_every_sigmoid_is_almost_nothing() -> None:
    """Without the 1e-20 of the denominator these would be 0 / 0."""
    _, weights = choose(torch.full((1, 8), -100.0), 3)
    assert bool((weights < 1e-20).all())


def test_neighbouring_floats_are_told_apart() -> None:
    one = torch.tensor(1.0)
    logits = torch.stack([one, torch.nextafter(one, one * 2), torch.nextafter(one, one * 0)])[None]
    assert choose(logits, 3)[0].tolist() == [[1, 0, 2]]


def test_ids_stay_in_range_whatever_the_logits() -> None:
    """A NaN from a broken model must not make a kernel read past the experts."""
    logits = torch.full((2, 100), torch.nan)
    logits[1] = -logits[1]
    ids = interpret(topk(100, 6), {"logits": logits, "seqs": torch.zeros(2, dtype=torch.int32)}, B=2)["ids"]
    assert bool(((ids >= 0) & (ids < 100)).all())


def test_a_number_below_all_others_is_chosen_once() -> None:
    """The NaN with all bits set has the order of what is taken out, and of padding."""
    logits = torch.full((1, 100), -1, dtype=torch.int32).view(torch.float32)
    ids = interpret(topk(100, 6), {"logits": logits, "seqs": torch.zeros(1, dtype=torch.int32)}, B=1)["ids"]
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("experts", [8, 33, 64, 100, 256, 300])
def test_ties_within_a_lane_and_across_lanes(experts: int) -> None:
    """Few different logits, so that neighbours, lists and lanes all hold equal ones."""
    given = torch.Generator().manual_seed(experts)
    choose(torch.randint(0, 3, (4, experts), generator=given).float(), 6)
    spread = torch.zeros(1, experts)
    spread[0, torch.randperm(experts, generator=given)[:6]] = 1.0
    choose(spread, 6)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(8, 256, generator=torch.Generator().manual_seed(3))
    ids, weights = choose(logits, 6)
    alone_ids, alone_weights = choose(logits[5:6], 6)
    assert torch.equal(ids[5:6], alone_ids)
    assert torch.equal(weights[5:6], alone_weights)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("worth", [1.0, torch.nan])
def test_a_padded_row_chooses_no_expert(worth: float, score: str) -> None:
    """Whatever its logits are; the rows around it choose as they would without it."""
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(4))
    ids, weights = choose(logits, 5, score)
    logits[1::2] = worth
    got_ids, got_weights = choose(logits, 5, score, seqs=torch.tensor([0, -1, 3, -1], dtype=torch.int32))
    assert torch.equal(got_ids[::2], ids[::2]) and torch.equal(got_weights[::2], weights[::2])
    assert (got_ids[1::2] == -1).all() and (got_weights[1::2] == 0).all()
