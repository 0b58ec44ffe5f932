"""What holds for every command: exit codes, one JSON object, one line per error, help."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from said import Flintc
from typer.main import get_command

from flintc import api, cli
from flintc.cli import common


def leaves(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command, those of groups included, as it is typed."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name)


COMMANDS = list(leaves(get_command(cli.build_app())))


def test_the_commands_of_the_contract() -> None:
    promised = ["compile", "show", "ablate", "generate", "verify", "synth", "convert", "tune", "demo", "env"]
    benches = [
        ("bench", name) for name in ("forward", "prefill", "generate", "compare", "limits", "bundles", "timeline")
    ]
    assert {(name,) for name in promised} | {*benches} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_json_debug_and_help(
    command: tuple[str, ...], flintc: Flintc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = flintc(*command, "--help")
    assert (said.code, said.err) == (0, "")
    assert "--json" in said.out and "--debug" in said.out


def test_without_a_command_there_is_help_and_no_error(flintc: Flintc) -> None:
    for argv in ((), ("--debug",), ("bench",)):
        said = flintc(*argv)
        assert (said.code, said.err) == (2, "")
        assert "Usage: flintc" in said.out and "Commands" in said.out


def test_version(flintc: Flintc) -> None:
    assert flintc("--version")[:2] == (0, "0.1.0\n")


@pytest.mark.parametrize(
    "argv",
    [
        ("env",),
        ("show", "tiny-flint"),
        ("ablate", "tiny-flint"),
        ("compile", "tiny-flint", "-o", "{new}"),
        ("synth", "--spec", "tiny-flint", "-o", "{new}"),
        ("convert", "{checkpoint}", "--format", "gguf", "-o", "{new}.gguf"),
        ("generate", "{checkpoint}", "--prompt", "ab", "--max-tokens", "2", "--backend", "reference"),
        ("generate", "{checkpoint}", "--chat", "hi", "--max-tokens", "2", "--backend", "reference"),
    ],
    ids=" ".join,
)
def test_json_is_one_object_and_nothing_else(
    argv: tuple[str, ...], flintc: Flintc, checkpoint: Path, tmp_path: Path
) -> None:
    said = flintc(*(a.format(new=tmp_path / "new", checkpoint=checkpoint) for a in argv), "--json")
    assert said.code == 0, said.err
    assert isinstance(json.loads(said.out, parse_constant=pytest.fail), dict)
    assert said.out.count("\n") == 1
    assert all(line.startswith("flintc: warning: ") for line in said.err.splitlines())


def test_json_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"a": [1.5, math.nan, {"b": math.inf}], "c": (-math.inf, 2), "d": "nan", "e": True}
    common.emit(True, data, lambda: pytest.fail("shown"))
    got = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert got == {"a": [1.5, None, {"b": None}], "c": [None, 2], "d": "nan", "e": True}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("abalte",), "No such command 'abalte'. Did you mean 'ablate'?"),
        (("show",), "Missing argument 'SPEC'"),
        (("show", "tiny-flint", "--fromat", "svg"), "--format"),
        (("show", "tiny-flint", "--format", "pdf"), "Invalid value for '--format': 'pdf' is not one of"),
        (("show", "tiny-flint", "--after", "residual-nrom"), "(did you mean 'residual-norm'?"),
        (("show", "tiny-flint", "--layer", "6"), "no layer 6 (it has layers 0-5)"),
        (("show", "tiny-flint", "--layer", "6", "--format", "dot"), "no layer 6 (it has layers 0-5)"),
        (("show", "tiny-flnt"), "no spec file tiny-flnt (did you mean 'tiny-flint'?)"),
        (("show", "no-such-file.yaml"), "no spec file no-such-file.yaml"),
        (("show", "tiny-flint", "--weights", "fp8"), "unknown weight format 'fp8' (choose bf16 or nvfp4)"),
        (("compile", "tiny-flint", "--target", "sm_80"), "unknown target 'sm_80' (choose from sm_90, sm_100)"),
        (("compile", "tiny-flint", "--batch", "1,x"), "--batch '1,x' is not a list of whole numbers"),
        (("compile", "tiny-flint", "--batch", "1,²"), "--batch '1,²' is not a list of whole numbers"),
        (("compile", "tiny-flint", "--batch", "9"), "between 1 and 8"),
        (("compile", "tiny-flint", "--disable-pass", "atention-merge"), "did you mean 'attention-merge'?"),
        (("compile", "tiny-flint", "-o", "{file}"), "exists and is not a bundle"),
        (("ablate", "tiny-flint", "--bandwidth", "nan"), "bandwidth must be positive, not nan"),
        (("ablate", "tiny-flint", "--context", "0"), "--context"),
        (("ablate", "tiny-flint", "--bundles", "{empty}"), "--measure synthetic runs, which is not asked for"),
        (("ablate", "tiny-flint", "--measure", "synthetic", "--batch", "9"), "steps of up to 8 rows"),
        (("bench", "compare", "tiny-flnt"), "no spec file tiny-flnt (did you mean 'tiny-flint'?)"),
        (("bench", "compare", "tiny-flint", "--context", "0"), "--context"),
        (("bench", "limits", "tiny-flint", "--context", "0"), "--context"),
        (("bench", "limits", "tiny-flnt"), "no spec file tiny-flnt"),
        (("bench", "timeline", "tiny-flint", "--trace", "{empty}/none/x.json"), "there is no folder"),
        (("bench", "bundles", "{empty}"), "one bundle has nothing to be timed against (name two or more)"),
        (("bench", "bundles", "{empty}", "{empty}"), "no bundle at"),
        (("bench", "compare", "tiny-flint", "--compile-limit", "0"), "--compile-limit"),
        (("bench", "compare", "tiny-flint", "--no-compile", "--compile-limit", "9"), "that --no-compile leaves out"),
        (("bench", "forward", "tiny-flint", "--trace", "{empty}/none/x.json"), "there is no folder"),
        (("tune", "tiny-flint", "--candidate", "w3"), "no candidate is called w3"),
        (("tune", "tiny-flint", "--prepared", "{empty}/none"), "none: no such folder (`flintc tune --prepare` makes"),
        (("tune", "tiny-flint", "--prepare", "{empty}/x", "--out", "{empty}/y"), "of the timing that follows"),
        (("tune", "tiny-flint", "--out", "{empty}/none/x.yaml"), "there is no folder"),
        (("verify", "{checkpoint}", "--bisect", "--save-trace", "{empty}/none/x"), "there is no folder"),
        (("verify", "{checkpoint}", "--text", "{empty}"), "cannot be read: Is a directory"),
        (("verify", "{checkpoint}", "--run", "reference/1"), "are of --bisect, which is not asked for"),
        (("verify", "{checkpoint}", "--save-trace", "{empty}/x"), "are of --bisect, which is not asked for"),
        (("verify", "{checkpoint}", "--bisect", "--kernels", "reference"), "--kernels are not of --bisect"),
        (("show", "flint", "--for", "{empty}"), "config.json: no such file"),
        (("generate", "{empty}/none", "--prompt", "x"), "no such file or folder"),
        (("generate", "{empty}", "--prompt", "x"), "config.json: no such file"),
        (("generate", "{checkpoint}"), "give either --prompt or --chat"),
        (("generate", "{checkpoint}", "--prompt", "x", "--chat", "y"), "give either --prompt or --chat"),
        (("generate", "{checkpoint}", "--prompt", ""), "the prompt is empty"),
        (("generate", "{checkpoint}", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "{checkpoint}", "--prompt", "x", "--bundle", "{empty}"), "no bundle at"),
        (("generate", "{checkpoint}", "--prompt", "x", "--backend", "gpu"), "'gpu' is not one of"),
        (("synth", "--spec", "tiny-flint", "-o", "{checkpoint}"), "exists already"),
        (("synth", "--spec", "tiny-flint", "-o", "{empty}/new", "--set", "expert=3"), "did you mean 'experts'?"),
        (("synth", "--spec", "tiny-flint", "-o", "{empty}/new", "--set", "experts"), "is not NAME=N"),
        (("synth", "--spec", "tiny-flint", "-o", "{empty}/new", "--set", "experts=²"), "is not NAME=N"),
        (("convert", "{empty}/none", "--format", "gguf", "-o", "{empty}/x.gguf"), "no such file"),
        (("convert", "{checkpoint}", "--format", "gguf", "-o", "{empty}/x", "--device", "gpu"), "'gpu' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_bad_usage_and_bad_input_exit_2_with_one_line(
    argv: tuple[str, ...], words: str, flintc: Flintc, checkpoint: Path, tmp_path: Path
) -> None:
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("mine")
    said = flintc(*(a.format(empty=empty, file=file, checkpoint=checkpoint) for a in argv))
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("flintc: error: ") and said.err.count("\n") == 1
    assert words in said.err
    assert list(empty.iterdir()) == [] and file.read_text() == "mine"


def test_failed_work_exits_1(flintc: Flintc, checkpoint: Path) -> None:
    said = flintc("generate", checkpoint, "--prompt", "x", "--max-tokens", "9999")
    assert (said.code, said.out) == (1, "")
    assert "exceed the context limit of 2048" in said.err and said.err.count("\n") == 1


def test_the_systems_errors_name_the_file(flintc: Flintc, tmp_path: Path) -> None:
    said = flintc("ablate", "tiny-flint", "--report", tmp_path)
    assert said.code == 1
    assert said.err == f"flintc: error: {tmp_path}: Is a directory\n"


def test_a_defect_is_one_line_and_a_traceback_only_on_request(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(api, "lower", broken)
    said = flintc("show", "tiny-flint")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "unexpected ZeroDivisionError: two lines" in said.err and "--debug" in said.err
    for argv in (("--debug", "show", "tiny-flint"), ("show", "tiny-flint", "--debug")):
        said = flintc(*argv)
        assert said.code == 1
        assert "Traceback" in said.err and "in broken" in said.err


def test_an_interrupt_is_no_traceback(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "lower", interrupted)
    assert flintc("show", "tiny-flint") == (1, "", "flintc: error: interrupted\n")


@pytest.mark.parametrize("argv", [("show", "flint"), ("env",)], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(argv: tuple[str, ...]) -> None:
    """As under ``| head``: the pipe is closed before the first write."""
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-m", "flintc", *argv]
    done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_only_on_a_terminal(flintc: Flintc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flintc("synth", "--spec", "tiny-flint", "-o", tmp_path / "a").err == ""
    screen = StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(common, "stderr", Console(file=screen, force_terminal=True))
    said = flintc("synth", "--spec", "tiny-flint", "-o", tmp_path / "b", "--json")
    assert "\x1b[" in screen.getvalue()
    assert set(json.loads(said.out)) == {"path", "format", "seed", "bytes", "files"}


def test_no_garbage_is_looked_for_on_the_way_out() -> None:
    """Half a second of it where torch is imported: all that is alive is out of the collector's sight by then."""
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 10_000))\n"
    code += "from flintc.cli import main; main(['env', '--json'])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "True"
