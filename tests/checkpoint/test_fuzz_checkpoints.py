"""A bounded run of the fuzzer; ``tests/checkpoint/fuzz.py --mutants N`` runs longer ones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from fuzz import LONGEST, attempt, fuzz
from mutants import Mutant, make_bases

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.assemble import PlainAssembly
from flintc.errors import CheckpointError

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


@pytest.mark.parametrize("form", ["gguf", "modelopt"])
def test_averaged_scales_are_noticed(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer can fail."""
    path = make_bases(tmp_path)[form]
    monkeypatch.setattr("flintc.checkpoint.assemble.narrow", lambda scale: scale.mean().reshape(1))
    assert "differs" in attempt(Mutant(path, form, "none"))


def test_reversed_rows_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer can fail."""
    path = make_bases(tmp_path)["bf16"]
    put = PlainAssembly.put
    monkeypatch.setattr(PlainAssembly, "put", lambda *given: put(*given[:3], given[3].flip(-1), given[4]))
    assert "differs" in attempt(Mutant(path, "bf16", "none"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-*.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = make_bases(tmp_path)["bf16"]
    file = next(folder.glob(name))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, 1 << 62])
def test_any_number_of_experts_may_be_claimed(count: int, tmp_path: Path) -> None:
    mutant = Mutant(make_bases(tmp_path)["bf16"], "bf16", "config")
    config = json.loads((mutant.path / "config.json").read_text())
    (mutant.path / "config.json").write_text(json.dumps(config | {"num_experts": count}))
    start = time.process_time()
    assert attempt(mutant) == "refused"
    assert time.process_time() - start < 1
