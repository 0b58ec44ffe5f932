"""`flintc generate --prepared` and `--stats`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
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
    loading, first = made.pop("loading"), made.pop("first_token_seconds")
    assert made == plain
    assert first > loading["seconds"]
    assert loading["source"] == "checkpoint" and loading["tensors"] > 100
    size = (checkpoint / "model.safetensors").stat().st_size
    assert 0.99 * size < loading["bytes_read"] < size
    assert loading["gb_per_s"] == pytest.approx(loading["bytes_read"] / 1e9 / loading["seconds"])
    assert loading["weight_bytes"] < loading["host_peak_anonymous_bytes"] < 4 << 30
    assert loading["device_peak_bytes"] is None


def test_stats_for_people_leave_stdout_to_the_text(flintc: Flintc, checkpoint: Path) -> None:
    plain, said = (flintc("generate", checkpoint, *ARGV, *more) for more in ((), ("--stats",)))
    assert said.out == plain.out and plain.err == ""
    first, *_, weights, token = said.err.splitlines()
    assert first.startswith("read 0.009 GB in ") and first.endswith(" GB/s")
    assert weights.startswith("weights take 0.009 GB; peak while loading: host (anonymous) 0.")
    assert re.fullmatch(r"first token \d+\.\d\d s after the start of the process", token)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_token_is_timed_from_the_start_of_the_process(checkpoint: Path, terminal: bool) -> None:
    """What comes after it counts as little as what the shell did before."""
    argv = [sys.executable, "-m", "flintc", "generate", str(checkpoint), *ARGV, "--stats"]
    reader, writer = os.openpty()
    start = time.monotonic()
    if terminal:  # the text is written as it comes
        err = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, check=True).stderr
        first = float(re.findall(r"^first token (\S+) s", err, re.M)[0])
    else:
        made = json.loads(subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True).stdout)
        first = made["first_token_seconds"]
        assert first > made["loading"]["seconds"]
    wall = time.monotonic() - start
    os.close(reader), os.close(writer)
    assert 0.5 * wall < first < wall


def test_no_time_is_told_where_the_system_tells_no_start(
    flintc: Flintc, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flintc.bench.started._STAT", tmp_path / "none")
    assert json.loads(flintc("generate", checkpoint, *ARGV, "--stats", "--json").out)["first_token_seconds"] is None
    assert "first token" not in flintc("generate", checkpoint, *ARGV, "--stats").err


def test_a_program_may_have_any_name(tmp_path: Path) -> None:
    """Blanks and brackets in it are not those that separate what the system tells."""
    name = tmp_path / "x) S 1 (y"
    name.symlink_to(sys.executable)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from flintc.bench.started import seconds_since_start as s; print(s())"
    )
    said = subprocess.run([name, "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < float(said) < 60


def test_a_copy_that_cannot_be_kept_is_a_warning(
    flintc: Flintc, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    said = flintc("generate", checkpoint, *ARGV, "--prepared")
    assert said.code == 0
    assert said.err == f"flintc: warning: no prepared copy is kept in {tmp_path}/file/below/prepared: Not a directory\n"
