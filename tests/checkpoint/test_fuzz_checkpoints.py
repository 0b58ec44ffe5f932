"""A bounded run of the fuzzer; ``tests/checkpoint/fuzz.py --mutants N`` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import LONGEST, attempt, fuzz
from mutants import Mutant, make_bases

SECONDS = 15.0


def test_mutants_are_refused_or_loaded_correctly() -> None:
    outcome = fuzz(range(1_000_000), seed=1, seconds=SECONDS)
    assert not outcome.wrong
    assert outcome.counts.total() > 100 and outcome.structural > 0.6
    assert outcome.slowest < LONGEST
    assert {verdict for _, _, verdict in outcome.counts} == {"refused", "loaded"}


def test_the_undamaged_load(tmp_path: Path) -> None:
    for form, path in make_bases(tmp_path).items():
        assert attempt(Mutant(path, form, "none")) == "loaded"


@pytest.mark.parametrize("form", ["gguf", "bf16", "modelopt"])
def test_a_wrong_value_is_noticed(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer can fail: a reader that swaps nibbles, or drops a weight's last row, is found out."""
    path = make_bases(tmp_path)[form]
    wrong = "flintc.checkpoint.nvfp4._split" if form == "gguf" else "flintc.checkpoint.safetensors.TensorReader.read"
    module, _, name = wrong.rpartition(".")
    original = __import__("pydoc").locate(wrong)
    monkeypatch.setattr(f"{module}.{name}", lambda *a: original(*a).flip(-1))
    assert "differs" in attempt(Mutant(path, form, "none"))
