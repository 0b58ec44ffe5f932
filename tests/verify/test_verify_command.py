"""``flintc verify`` from the command line, and ``--bisect`` on runs that differ in one kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernel_faults import KERNEL_FAULTS

from flintc import api
from flintc.bench import bisect as search
from flintc.bench.runners import InterpretRunner
from flintc.bench.step import prepare_step
from flintc.bench.subject import Subject, open_subject
from flintc.bench.verify import make_prompts, step_prompts
from flintc.cli import run
from flintc.errors import UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "model"
    api.synth("tiny-flint", path, demo_tokenizer=True)
    return path


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return open_subject(checkpoint, spec="tiny-flint")


@pytest.fixture(scope="module")
def trace(subject: Subject) -> search.Trace:
    """The reference's run of a step."""
    inputs = prepare_step(subject, step_prompts(subject, make_prompts(subject, None, 40, 4)))
    return search.trace_run(search.Run("reference"), subject.runner("reference"), inputs)


def verify(checkpoint: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    code = run(["verify", str(checkpoint), "--spec", "tiny-flint", "--json", *flags])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def test_figures_of_a_short_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = verify(checkpoint, capsys, "--kernels", "reference", "--tokens", "50", "--prompts", "3")
    assert code == 0 and data["passed"] is None and (data["prompts"], data["tokens"]) == (3, 150)
    assert {k["role"] for k in data["kernels"]} >= {"qkv", "attention", "route", "expert_gate_up", "expert_down"}
    assert all(k["passed"] and k["excess"] == 0 for k in data["kernels"])
    assert 0 < data["flintc"]["kl_mean"] <= data["flintc"]["kl_max"] and data["flintc"]["top1_agreement"] > 0.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "no-such-file"], "no-such-file: not a text"),
        (["--bisect", "--run", "fortran/8"], "neither BACKEND"),
        (["--backend", "fortran", "--kernels", "reference", "--tokens", "20"], "unknown backend 'fortran'"),
    ],
)
def test_mistakes(flags: list[str], said: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(checkpoint), *flags]) == 2
    assert said in capsys.readouterr().err


def test_bisect_prefixes_batches_and_a_trace(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved = str(tmp_path / "trace.safetensors")
    runs = ("--run", "reference@baseline/8", "--run", "reference/2", "--save-trace", saved)
    code, data = verify(checkpoint, capsys, "--bisect", "--tokens", "40", *runs)
    assert code == 0 and data["difference"] is None and not data["exact"] and data["values"] > 60
    code, data = verify(checkpoint, capsys, "--bisect", "--run", saved, "--run", "reference@residual-norm/4")
    assert code == 0 and data["difference"] is None and data["first"].startswith("reference@baseline/8")


def test_bisect_finds_the_layer_of_a_wrong_kernel(subject: Subject, trace: search.Trace) -> None:
    """Windows are one short: attention over the whole context agrees, the first windowed layer does not."""
    fault = next(f for f in KERNEL_FAULTS if f.kernel == "attention_window")
    plan = subject.plan()
    wrong = fault.plant(plan)
    runner = InterpretRunner(wrong)
    runner.graph = plan.graph.with_launches(tuple(x for x in plan.graph.launches if x.role == "attention"))
    found = search.bisect(subject, trace, search.Run("interpret"), runner)
    assert found.found is not None and found.launch == "L2.attention" and found.layer == 2
    assert found.found.value == "L2.a" and found.found.wrong > 0 and found.launches == 3


def test_kernels_give_equal_bits_whatever_the_batch(subject: Subject, trace: search.Trace) -> None:
    plan = subject.plan()
    runner = InterpretRunner(plan)
    runner.graph = plan.graph.with_launches(tuple(x for x in plan.graph.launches if x.name.startswith("L2.")))
    alone = search.Trace("interpret/8", trace.inputs, _made(runner, trace, 8), search.Run("interpret", None, 8))
    found = search.bisect(subject, alone, search.Run("interpret", None, 1), runner)
    assert found.exact and found.found is None and found.values > 5


def _made(runner: InterpretRunner, trace: search.Trace, batch: int) -> dict:
    """The reference's values, those of the runner's launches replaced by what these make one from another."""
    made = dict(trace.made)
    for launch in runner.graph.launches:
        made.update(search.forced(runner, launch, trace.inputs, {**trace.inputs.values, **made}, batch))
    return made


@pytest.mark.parametrize("text", ["cpu", "reference/3", "interpret@x/", ""])
def test_runs_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="neither"):
        search.parse_run(text)
