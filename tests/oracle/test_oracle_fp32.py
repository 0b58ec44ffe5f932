"""The reference in FP32 against transformers in FP32, over random small Flints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driver import Driver
from random_flints import COUNT, greedy, load, logits, random_model, random_prompt

from flintc.reference import rope_table

PROMPT = 40  # longer than any window


@pytest.mark.parametrize("seed", range(COUNT))
def test_logits_and_greedy_tokens(seed: int, tmp_path: Path) -> None:
    random_model(seed).save_pretrained(tmp_path)
    oracle = load(tmp_path, torch.float32)
    prompt = random_prompt(seed, oracle.config.vocab_size, PROMPT)
    expected = logits(oracle, prompt)
    assert 1 < expected.std() < 10 and oracle.config.sliding_window < PROMPT
    driver = Driver(tmp_path, "fp32", lower=seed % 2 == 1)
    torch.testing.assert_close(driver.feed(prompt), expected, atol=1e-4, rtol=0)
    assert driver.report.notes == []
    assert Driver(tmp_path, "fp32").greedy(prompt, 16) == greedy(oracle, prompt, 16)


def wider_window(driver: Driver, path: Path) -> Driver:
    config = json.loads((path / "config.json").read_text())
    config["sliding_window"] += 1
    (path / "config.json").write_text(json.dumps(config))
    return Driver(path, "fp32")


def no_sinks(driver: Driver, path: Path) -> Driver:
    for name, value in driver.state.items():
        if name.endswith("w.sinks"):
            value.fill_(-1e9)
    return driver


def other_theta(driver: Driver, path: Path) -> Driver:
    table = driver.state["rope_table"]
    driver.state["rope_table"] = rope_table(table.shape[0], table.shape[2] * 2, theta=12345.0)
    return driver


def swapped_halves(driver: Driver, path: Path) -> Driver:
    for name, value in driver.state.items():
        if name.endswith("gate_up"):
            driver.state[name] = value.roll(value.shape[-2] // 2, dims=-2)
    return driver


@pytest.mark.parametrize("mistake", [wider_window, no_sinks, other_theta, swapped_halves])
def test_mistakes_are_noticed(mistake: Callable[[Driver, Path], Driver], tmp_path: Path) -> None:
    """The comparison above can fail: each of these moves some logit by far more than its tolerance."""
    seed = 4
    random_model(seed).save_pretrained(tmp_path)
    oracle = load(tmp_path, torch.float32)
    prompt = random_prompt(seed, oracle.config.vocab_size, PROMPT)
    got = mistake(Driver(tmp_path, "fp32"), tmp_path).feed(prompt)
    assert (got - logits(oracle, prompt)).abs().max() > 1e-2
