"""Sampling against plain definitions, statistics and edge cases."""

import math

import pytest
import torch

from flintc.errors import UsageError
from flintc.runtime.sampling import SamplingParams, sample

GREEDY = SamplingParams(temperature=0.0)


def plain_support(logits, temperature, top_k, top_p):
    """{id: probability} after temperature, top-k, top-p, written with sorted lists."""
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        best = best[:top_k]
    weights = [math.exp((logits[i] - logits[best[0]]) / temperature) for i in best]
    kept, held = {}, 0.0
    for i, weight in zip(best, weights, strict=True):
        if held >= top_p * sum(weights) and top_p < 1:
            break
        kept[i] = weight
        held += weight
    return {i: weight / held for i, weight in kept.items()}


def draw(logits, count, **params):
    rows = logits.expand(count, -1)
    return sample(rows, [SamplingParams(seed=3, **params)] * count, list(range(count))).ids


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.5, 8, 0.9), (0.3, 20, 0.95), (1.0, 1, 1.0)],
)
def test_frequencies_follow_the_definition(temperature, top_k, top_p):
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 2
    expected = plain_support(logits.tolist(), temperature, top_k, top_p)
    count = 20_000
    counts = torch.bincount(draw(logits, count, temperature=temperature, top_k=top_k, top_p=top_p), minlength=30)
    assert {i for i in range(30) if counts[i]} <= set(expected)
    for i, p in expected.items():
        deviation = math.sqrt(count * p * (1 - p))
        assert abs(counts[i].item() - count * p) <= 4.5 * deviation + 1, f"id {i}"


def test_cut_order_is_top_k_then_top_p():
    # Of all eight the best holds 0.3; of the two that top-k leaves it holds 0.6, which alone satisfies top_p = 0.5.
    probabilities = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])
    ids = draw(probabilities.log(), 500, temperature=1.0, top_k=2, top_p=0.5)
    assert set(ids.tolist()) == {0}
    ids = draw(probabilities.log(), 500, temperature=1.0, top_k=0, top_p=0.5)
    assert set(ids.tolist()) == {0, 1}


def test_temperature_comes_before_top_p():
    # At temperature 4 the best token's share falls from 0.9 below 0.5, so that top_p = 0.5 needs more than it.
    probabilities = torch.tensor([0.9, 0.05, 0.03, 0.02])
    assert set(draw(probabilities.log(), 500, temperature=4.0, top_k=0, top_p=0.5).tolist()) == {0, 1}


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0], [-0.0, 0.0, -5.0, 0.0], [-3.0, -4.0, -4.0, -3.0]])
    assert sample(logits, [GREEDY] * 3, [0, 0, 0]).ids.tolist() == [1, 0, 0]


def test_equal_logits_at_the_top_k_edge_keep_the_lowest_ids():
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0])
    assert set(draw(logits, 400, temperature=5.0, top_k=2, top_p=1.0).tolist()) == {0, 1}


def test_padded_ids_are_never_chosen():
    logits = torch.zeros(300, 10)
    logits[:, 6:] = 50.0
    params = [SamplingParams(top_k=k, top_p=1.0) if k else GREEDY for k in (0, 4, 20)] * 100
    got = sample(logits, params, list(range(300)), vocab=6)
    assert got.ids.max().item() < 6
    assert torch.allclose(got.logprobs, torch.full((300,), -math.log(6)))


def test_logprobs_are_the_models_own():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    params = [GREEDY, SamplingParams(temperature=0.5), SamplingParams(top_k=3), SamplingParams(top_p=0.2)]
    got = sample(logits, params, [9] * 4)
    expected = torch.log_softmax(logits, 1)[torch.arange(4), got.ids]
    assert torch.allclose(got.logprobs, expected, atol=1e-6)


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 200, generator=generator) * 3
    params = [
        SamplingParams(temperature=(i % 4) * 0.5, top_k=(0, 1, 7, 300)[i % 3], top_p=(1.0, 0.9, 0.1)[i % 3], seed=i)
        for i in range(40)
    ]
    together = sample(logits, params, list(range(40)))
    for i in range(40):
        alone = sample(logits[i : i + 1], params[i : i + 1], [i])
        assert alone.ids[0] == together.ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_seed_and_position_decide():
    logits = torch.zeros(1, 1000)
    flat = SamplingParams(top_k=0, top_p=1.0, seed=11)
    same = [sample(logits, [flat], [4]).ids.item() for _ in range(3)]
    assert len(set(same)) == 1
    moved = {sample(logits, [flat], [p]).ids.item() for p in range(50)}
    assert len(moved) > 40
    other = SamplingParams(top_k=0, top_p=1.0, seed=2**64 - 1)
    assert sample(logits, [other], [4]).ids.item() != same[0]


def test_extreme_logits_and_temperatures():
    logits = torch.tensor([[1e30, -1e30, 0.0, float("-inf")]])
    for temperature in (1e-6, 1.0, 1e6):
        got = sample(logits, [SamplingParams(temperature=temperature, top_k=0, top_p=1.0)], [0])
        assert got.ids.item() == 0
        assert got.logprobs.item() == 0.0


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"seed": -1},
     {"seed": 2**64}, {"seed": 1.0}, {"top_k": 20.0}, {"top_k": None}],
)  # fmt: skip
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_gpu_chooses_what_the_cpu_chooses():
    logits = torch.randn(64, 150_144, generator=torch.Generator().manual_seed(6)) * 3
    params = [
        SamplingParams(temperature=(i % 3) * 0.5, top_k=(20, 0, 500)[i % 3], top_p=(0.95, 1.0)[i % 2], seed=i)
        for i in range(64)
    ]
    positions = list(range(64))
    here, there = sample(logits, params, positions), sample(logits.cuda(), params, positions)
    assert torch.equal(here.ids, there.ids.cpu())
    assert torch.allclose(here.logprobs, there.logprobs.cpu(), atol=1e-6)
