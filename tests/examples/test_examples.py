"""The examples run and say what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import flintc
from flintc.bundle import load_bundle

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_pass_saves_launches_and_agrees_with_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_pass.py"), run_name="__main__")
    said = capsys.readouterr().out
    before, after = (int(word) for word in said.split("\n")[0].split() if word.isdigit())
    assert after < before
    assert float(said.rsplit(":", 1)[1]) < 2**-6


def test_a_kernel_changed_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled into a bundle where only that kernel is another; refused where it no longer waits for its input."""
    generated = flintc.compile("tiny-flint", out=tmp_path / "generated")
    name = next(name for name in generated.plan.kernels if name.startswith("topk"))
    mine = tmp_path / "mine.py"

    def change(source: str) -> None:
        mine.write_text(source)
        words = [
            "change_a_kernel.py",
            tmp_path / "generated",
            name,
            mine,
            "-o",
            tmp_path / "changed",
            "--registers",
            64,
        ]
        monkeypatch.setattr("sys.argv", [str(word) for word in words])
        runpy.run_path(str(EXAMPLES / "change_a_kernel.py"), run_name="__main__")

    source = (tmp_path / "generated" / "kernels" / f"{name}.py").read_text()
    change(source + "\n# by hand\n")
    assert f"{name} for sm_90: " in capsys.readouterr().out
    made = load_bundle(tmp_path / "changed").plan.kernels
    assert {n for n in made if made[n] != generated.plan.kernels[n]} == {name}
    assert (made[name].source, made[name].max_registers) == (source + "\n# by hand\n", 64)
    with pytest.raises(SystemExit):
        change(source.replace("    wait_for_producers()\n", "", 1))
    assert f"kernel {name}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        name = "none"
        change(source)
    assert "no kernel of a step is called none: " in capsys.readouterr().err
