"""BF16 judged by KL divergence from transformers in FP32, beside transformers' own BF16 on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_flints import COUNT, load, logits, random_model, random_prompt
from torch import Tensor

import flintc

TOKENS = 200
BOUND = 1.25


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference || other) in nats, summed over positions; logits [T, vocab]."""
    p, q = (x.double().log_softmax(-1) for x in (reference, other))
    return float((p.exp() * (p - q)).sum())


@pytest.fixture(scope="module")
def divergences(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """[COUNT, 2]: of flintc's BF16 and of transformers' BF16, each against transformers in FP32."""
    return torch.tensor([_divergences(seed, tmp_path_factory.mktemp("flint")) for seed in range(COUNT)])


def _divergences(seed: int, path: Path) -> tuple[float, float]:
    random_model(seed, torch.bfloat16).save_pretrained(path)
    exact = load(path, torch.float32)
    prompt = random_prompt(seed, exact.config.vocab_size, TOKENS)
    expected = logits(exact, prompt)
    ours = flintc.load(path, spec=("flint", "tiny-flint")[seed % 2]).forward(prompt)
    return divergence(expected, ours), divergence(expected, logits(load(path, torch.bfloat16), prompt))


def test_pooled_divergence_is_within_the_bound(divergences: Tensor) -> None:
    """Bootstrap over the models: with 95 % confidence the pooled ratio does not exceed the bound."""
    draws = torch.randint(0, COUNT, (10_000, COUNT), generator=torch.Generator().manual_seed(0))
    totals = divergences[draws].sum(1)
    upper = float((totals[:, 0] / totals[:, 1]).quantile(0.95))
    pooled = divergences.sum(0)
    print(f"pooled KL per token {pooled / (COUNT * TOKENS)}, ratio {pooled[0] / pooled[1]:.3f}, bound {upper:.3f}")
    assert (divergences > 0).all() and (pooled / (COUNT * TOKENS) < 0.1).all()
    assert upper <= BOUND
