"""`flintc generate --prepared` and `--stats`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from said import Flintc

ARGV = ("--prompt", "import os", "--max-tokens", "3", "--seed", "4")


def test_prepared_copies_lie_in_the_cache(
    flintc: Flintc, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path))
    plain = flintc("generate", checkpoint, *ARGV)
    assert list(tmp_path.iterdir()) == []
    said = [json.loads(flintc("generate", checkpoint, *ARGV, "--prepared", "--stats", "--json").out) for _ in range(2)]
    assert [made["loading"]["source"] for made in said] == ["checkpoint", "prepared"]
    assert {made["text"] + "\n" for made in said} == {plain.out}
    assert len(list(tmp_path.glob("prepared/*/weights.safetensors"))) == 1


def test_stats_in_json(flintc: Flintc, checkpoint: Path) -> None:
    plain = json.loads(flintc("generate", checkpoint, *ARGV, "--json").out)
    made = json.loads(flintc("generate", checkpoint, *ARGV, "--stats", "--json").out)
    loading = made.pop("loading")
    assert made == plain
    assert loading["source"] == "checkpoint" and loading["tensors"] > 100
    size = (checkpoint / "model.safetensors").stat().st_size
    assert 0.99 * size < loading["bytes_read"] < size
    assert loading["gb_per_s"] == pytest.approx(loading["bytes_read"] / 1e9 / loading["seconds"])
    assert loading["weight_bytes"] < loading["host_peak_anonymous_bytes"] < 4 << 30
    assert loading["device_peak_bytes"] is None


def test_stats_for_people_leave_stdout_to_the_text(flintc: Flintc, checkpoint: Path) -> None:
    plain, said = (flintc("generate", checkpoint, *ARGV, *more) for more in ((), ("--stats",)))
    assert said.out == plain.out and plain.err == ""
    first, *_, last = said.err.splitlines()
    assert first.startswith("read 0.009 GB in ") and first.endswith(" GB/s")
    assert last.startswith("weights take 0.009 GB; peak while loading: host (anonymous) 0.")


def test_a_copy_that_cannot_be_kept_is_a_warning(
    flintc: Flintc, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    said = flintc("generate", checkpoint, *ARGV, "--prepared")
    assert said.code == 0
    assert said.err == f"flintc: warning: no prepared copy is kept in {tmp_path}/file/below/prepared: Not a directory\n"
