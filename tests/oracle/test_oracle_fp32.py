"""flintc in FP32 against transformers in FP32, over random small Flints that transformers saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_flints import COUNT, greedy, load, logits, random_model, random_prompt
from safetensors.torch import load_file, save_file

import flintc

PROMPT = 40  # longer than any window


def ours(path: Path, seed: int = 0) -> flintc.Model:
    """Odd seeds take tiny-flint: the same model, with attention chunks so short that these prompts have several."""
    return flintc.load(path, numerics="fp32", spec=("flint", "tiny-flint")[seed % 2])


@pytest.mark.parametrize("seed", range(COUNT))
def test_logits_and_greedy_tokens(seed: int, tmp_path: Path) -> None:
    random_model(seed).save_pretrained(tmp_path)
    oracle = load(tmp_path, torch.float32)
    prompt = random_prompt(seed, oracle.config.vocab_size, PROMPT)
    expected = logits(oracle, prompt)
    assert 1 < expected.std() < 10 and oracle.config.sliding_window < PROMPT
    model = ours(tmp_path, seed)
    torch.testing.assert_close(model.forward(prompt), expected, atol=1e-4, rtol=0)
    assert list(model.generate(prompt, max_tokens=16, temperature=0.0).token_ids) == greedy(oracle, prompt, 16)


def change_config(path: Path, change: Callable[[dict], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def wider_window(path: Path) -> None:
    change_config(path, lambda config: config.update(sliding_window=config["sliding_window"] + 1))


def other_theta(path: Path) -> None:
    change_config(path, lambda config: config["rope_parameters"].update(rope_theta=12345.0))


def no_sinks(path: Path) -> None:
    stored = load_file(path / "model.safetensors")
    changed = {name: t - 1e9 if name.endswith("softmax_offset") else t for name, t in stored.items()}
    save_file(changed, path / "model.safetensors")


def gate_and_up_swapped(path: Path) -> None:
    stored = load_file(path / "model.safetensors")
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    renamed = {".".join(swapped.get(word, word) for word in name.split(".")): t for name, t in stored.items()}
    save_file(renamed, path / "model.safetensors")


@pytest.mark.parametrize("mistake", [wider_window, other_theta, no_sinks, gate_and_up_swapped])
def test_mistakes_are_noticed(mistake: Callable[[Path], None], tmp_path: Path) -> None:
    """The comparison above can fail: each of these moves some logit by far more than its tolerance."""
    seed = 4
    random_model(seed).save_pretrained(tmp_path)
    oracle = load(tmp_path, torch.float32)
    prompt = random_prompt(seed, oracle.config.vocab_size, PROMPT)
    expected = logits(oracle, prompt)
    mistake(tmp_path)
    assert (ours(tmp_path).forward(prompt) - expected).abs().max() > 1e-2
