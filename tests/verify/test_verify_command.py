"""``flintc verify`` from the command line, and ``--bisect`` on runs that differ in one kernel."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_faults import KERNEL_FAULTS
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flintc import api
from flintc.bench import bisect as search
from flintc.bench import verify as verifier
from flintc.bench.runners import InterpretRunner, ReferenceRunner
from flintc.bench.step import prepare_step
from flintc.bench.subject import Subject, open_subject
from flintc.bench.verify import check_kernels, make_prompts, step_prompts
from flintc.bench.verify import verify as check
from flintc.cli import run
from flintc.codegen.planner import plan
from flintc.errors import UsageError
from flintc.runtime.executor import Executor
from flintc.runtime.kv import KvLayout

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
FILE = EXAMPLE / "tiny-flint.gguf"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return open_subject(EXAMPLE)


@pytest.fixture(scope="module")
def trace(subject: Subject) -> search.Trace:
    """The reference's run of a step, with rows on both sides of the window's edge (65)."""
    inputs = prepare_step(subject, step_prompts(subject, make_prompts(subject, None, 100, 4)))
    return search.trace_run(search.Run("reference"), subject.runner("reference"), inputs)


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is told before anything is read: no checkpoint is opened."""
    monkeypatch.setattr("flintc.bench.subject.open_subject", lambda *args, **kwargs: pytest.fail("opened"))


def verify(checkpoint: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    code = run(["verify", str(checkpoint), "--json", *flags])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


@pytest.mark.parametrize("checkpoint", [EXAMPLE, FILE], ids=["bf16", "nvfp4"])
def test_figures_of_a_short_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = verify(checkpoint, capsys, "--kernels", "reference", "--tokens", "50", "--prompts", "3")
    assert code == 0 and data["passed"] is None and (data["prompts"], data["tokens"]) == (3, 150)
    assert {k["role"] for k in data["kernels"]} >= {"heads", "attention_merge", "route", "topk", "expert_down"}
    assert all(k["passed"] and k["excess"] == 0 for k in data["kernels"])
    (found,) = data["flintc"]
    assert found["path"] == "reference" and found["passed"] is None
    assert 0 < found["kl_mean"] <= found["kl_max"] < 0.1 and found["top1_agreement"] > 0.9
    assert found["perplexity"] == pytest.approx(data["perplexity_fp32"], rel=0.01)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "no-such-file"], "no-such-file: cannot be read: No such file or directory\n"),
        (["--text", str(FILE)], f"{FILE.name}: not a text in UTF-8: "),
        (["--bisect", "--run", "fortran/8"], "neither BACKEND"),
        (["--bisect", "--run", "reference/8", "--run", "cuda/8"], "there is no NVIDIA GPU here"),
        (["--bisect", *3 * ["--run", "reference/8"]], "more than twice"),
        (["--backend", "fortran"], "Invalid value for '--backend': 'fortran' is not one of"),
        (["--kernels", "fortran"], "Invalid value for '--kernels': 'fortran' is not one of"),
        (["--backend", "cuda"], "there is no NVIDIA GPU here"),
        (["--kernels", "cuda"], "there is no NVIDIA GPU here"),
    ],
)
@pytest.mark.usefixtures("unopened")
def test_mistakes(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["verify", str(EXAMPLE), *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["verify", str(EXAMPLE)], ["ablate", "flint", "--measure", str(EXAMPLE)]])
@pytest.mark.usefixtures("unopened")
def test_without_transformers(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    monkeypatch.setitem(sys.modules, "flintc.bench.oracle", None)
    assert run(argv) == 2
    said = capsys.readouterr().err
    assert "needs transformers: " in said and said.endswith("(pip install 'flintc[verify]')\n")


def test_a_model_that_is_no_model_fails_on_a_short_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN logits at one position of one prompt in three; and JSON that anybody can read."""
    right, ruined = verifier.run_prompts, []

    def wrong(executor: Executor, prompts: list[list[int]]) -> list[Tensor]:
        made = right(executor, prompts)
        if not ruined:
            made[0][7] = torch.nan
            ruined.append(True)
        return made

    monkeypatch.setattr(verifier, "run_prompts", wrong)
    flags = ("--kernels", "reference", "--tokens", "50", "--prompts", "3")
    assert run(["verify", str(EXAMPLE), "--json", *flags]) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (found,) = data["flintc"]
    assert data["passed"] is found["passed"] is False
    assert found["kl_mean"] is found["kl_max"] is found["perplexity"] is found["ratio_upper"] is None
    assert found["reason"].startswith("no finite KL from FP32 in 1 of 3 prompts")


@pytest.mark.parametrize("checkpoint", [EXAMPLE, FILE], ids=["bf16", "nvfp4"])
def test_bisect_prefixes_batches_and_a_trace(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved = str(tmp_path / "trace.safetensors")
    runs = ("--run", "reference@baseline/8", "--run", "reference/2", "--save-trace", saved)
    code, data = verify(checkpoint, capsys, "--bisect", "--tokens", "40", *runs)
    assert code == 0 and data["difference"] is None and not data["exact"] and data["values"] > 60
    code, data = verify(checkpoint, capsys, "--bisect", "--run", saved, "--run", "reference@residual-norm/4")
    assert code == 0 and data["difference"] is None and data["first"].startswith("reference@baseline/8")
    with safe_open(saved, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["made/L3.a"][2, 7] += 1
    save_file(tensors, saved, metadata)
    code, data = verify(checkpoint, capsys, "--bisect", "--run", saved, "--run", "reference/8")
    found = data["difference"]
    assert (code, data["launch"], data["layer"], data["passed"]) == (1, "L3.attention_merge", 3, False)
    assert (found["value"], found["place"], found["wrong"]) == ("L3.a", [2, 7], 1)
    assert found["want"] - found["got"] == pytest.approx(1, abs=0.02) and found["error"] > found["allowed"]


def test_bisect_says_where_in_words(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """The default pair of runs, their kernels replaced by the reference with one wrong value."""

    class Wrong(ReferenceRunner):
        def run(self, launch, values, env):
            made = super().run(launch, values, env)
            return made | {"L6.h": made["L6.h"] * 1.5} if "L6.h" in made else made

    monkeypatch.setattr("flintc.bench.subject.InterpretRunner", lambda plan: Wrong(plan.graph))
    assert run(["verify", str(EXAMPLE), "--bisect", "--tokens", "20"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "first difference in L6.h, launch" in said and "(layer 6)" in said
    assert "interpret/8 has" in said and "reference/8" in said and "within rounding" in said


def test_bisect_of_kernels_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The default, torch against the interpreter; then two batch sizes of one kernel, which must agree in every bit."""
    sizes = {"layers": 3, "hidden": 64, "vocab": 96, "heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 4}
    sizes |= {"dense_width": 64, "expert_width": 16, "shared_width": 32, "experts_per_token": 2}
    api.synth("tiny-flint", tmp_path / "small", sizes=sizes)
    flags = ("--spec", "tiny-flint", "--bisect", "--tokens", "20")
    code, data = verify(tmp_path / "small", capsys, *flags)
    assert (code, data["first"], data["second"], data["exact"]) == (0, "reference/8", "interpret/8", False)
    code, data = verify(tmp_path / "small", capsys, *flags, "--run", "interpret@attention-merge/4",
                        "--run", "interpret@attention-merge/8")  # fmt: skip
    assert (code, data["exact"], data["difference"]) == (0, True, None) and data["launches"] > 30


def test_a_bundle_with_pages_and_chunks_of_its_own(subject: Subject) -> None:
    """Compiled from another spec of the same sizes: its graph is what is verified, and what its baseline is made of."""
    other = api.run_passes(api.model_of("tiny-flint", checkpoint=EXAMPLE)[0])
    bundled = replace(subject, bundle=SimpleNamespace(plan=plan(other.graph)))
    assert bundled.graph() == other.graph and bundled.graph("baseline") == other.steps[0].graph
    assert KvLayout.from_graph(bundled.graph("baseline")).page == 8 != KvLayout.from_graph(subject.graph()).page
    found = check(bundled, make_prompts(bundled, None, 40, 2), "reference", "reference")
    assert found.passed is None and all(k.worst.excess == 0 for k in found.kernels)


def test_bisect_finds_the_layer_of_a_wrong_kernel(subject: Subject, trace: search.Trace) -> None:
    """Windows are one short: attention over the whole context agrees, the first windowed layer does not."""
    fault = next(f for f in KERNEL_FAULTS if f.kernel == "attention_partial_window")
    sound = subject.plan()
    runner = InterpretRunner(fault.plant(sound))
    runner.graph = sound.graph.with_launches(tuple(x for x in sound.graph.launches if x.role == "attention_partial"))
    found = search.bisect(subject, trace, search.Run("interpret"), runner)
    assert found.found is not None and found.launch == "L2.attention" and found.layer == 2
    assert found.found.value.startswith("L2.a.") and found.found.wrong > 0 and found.launches == 3


def test_a_kernel_of_single_rows_is_checked_on_one(subject: Subject) -> None:
    """And the one that stands in for it on all: each with what it makes by itself."""
    name = next(k.name for k in subject.plan().kernels.values() if k.several is not None)

    class Wrong(InterpretRunner):
        def run(self, launch, values, env):
            by_kernel = self.plan.kernel_for(self._planned[launch.name], env["B"]).name
            made = ReferenceRunner.run(self, launch, values, env)
            return {n: t * 2 for n, t in made.items()} if by_kernel == wrong else made

    runner = Wrong(subject.plan())
    inputs = prepare_step(subject, step_prompts(subject, make_prompts(subject, None, 20, 3)))
    for wrong in (name, f"{name}_several"):
        found = {check.kernel: check.worst.passed for check in check_kernels(runner, inputs)}
        assert found.keys() == runner.plan.kernels.keys()
        assert [kernel for kernel, passed in found.items() if not passed] == [wrong]


def test_a_trace_is_written_whole_or_not_at_all(
    subject: Subject, trace: search.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_halfway(tensors: object, path: Path, metadata: object) -> None:
        path.write_text("a part")
        raise OSError("disk full")

    monkeypatch.setattr(search, "save_file", stop_halfway)
    with pytest.raises(OSError, match="disk full"):
        search.save_trace(tmp_path / "trace", trace, subject.graph("baseline"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["cpu", "reference/3", "interpret@x/", ""])
def test_runs_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="neither"):
        search.parse_run(text)
