"""GGUF files written by package gguf alone against transformers on the weights that gguf dequantises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driver import Driver
from random_flints import greedy, logits, random_prompt
from random_gguf import Flint

from flintc.reference.nvfp4 import Nvfp4

PROMPT = 40  # longer than any window
FORMS = {"own scales": {}, "shared scales": {"same_scales": True}, "no scales": {"drop_scales": True}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_logits_and_greedy_tokens(seed: int, form: str, tmp_path: Path) -> None:
    flint = Flint(seed, bf16_router=seed % 2 == 1, **FORMS[form])
    flint.write(tmp_path / "flint.gguf")
    oracle = flint.oracle()
    prompt = random_prompt(seed, flint.config.vocab_size, PROMPT)
    expected = logits(oracle, prompt)
    assert 0.5 < expected.std() < 20
    driver = Driver(tmp_path / "flint.gguf", "fp32", lower=seed % 2 == 1)
    torch.testing.assert_close(driver.feed(prompt), expected, atol=1e-4, rtol=0)
    assert sorted(driver.report.used) == sorted(flint.tensors)
    assert Driver(tmp_path / "flint.gguf", "fp32").greedy(prompt, 8) == greedy(oracle, prompt, 8)


def test_a_dropped_scale_is_noticed(tmp_path: Path) -> None:
    """The comparison above can fail: an averaged q/k/v scale moves logits by far more than its tolerance."""
    flint = Flint(1)
    flint.write(tmp_path / "flint.gguf")
    prompt = random_prompt(1, flint.config.vocab_size, PROMPT)
    driver = Driver(tmp_path / "flint.gguf", "fp32")
    packed = driver.state["L0.w.qkv"]
    assert isinstance(packed, Nvfp4) and packed.scale.ndim == 1 and packed.scale.unique().numel() == 3
    driver.state["L0.w.qkv"] = Nvfp4(packed.codes, packed.scales, packed.scale.mean().reshape(1))
    assert (driver.feed(prompt) - logits(flint.oracle(), prompt)).abs().max() > 1e-2
