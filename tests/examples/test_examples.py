"""The examples run and say what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_pass_saves_launches_and_agrees_with_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_pass.py"), run_name="__main__")
    said = capsys.readouterr().out
    before, after = (int(word) for word in said.split("\n")[0].split() if word.isdigit())
    assert after < before
    assert float(said.rsplit(":", 1)[1]) < 2**-6
