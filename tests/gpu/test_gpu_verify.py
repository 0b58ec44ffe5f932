"""``flintc verify`` and ``flintc ablate --measure`` on the GPU, on the trained model in both formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flintc import api
from flintc.bench.oracle import Oracle
from flintc.bench.runners import CudaRunner
from flintc.bench.step import filler, prepare_step, run_in_groups
from flintc.bench.subject import open_subject
from flintc.bench.verify import compare_launch, make_prompts, step_prompts
from flintc.cli import run

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
FORMS = {"bf16": EXAMPLE, "nvfp4": EXAMPLE / "tiny-flint.gguf"}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    """Exit code and JSON of a command."""
    code = run([*argv, "--json"])
    out, err = capsys.readouterr()
    assert out, err
    return code, json.loads(out)


def test_every_launch_and_both_ways_of_running_a_prompt(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = said(capsys, "verify", str(FORMS[form]), "--every-launch")
    assert found["kernels_path"] == "cuda" and found["weights"] == form
    assert all(kernel["passed"] for kernel in found["kernels"]), found["kernels"]
    steps, chunks = found["flintc"]
    assert "slices" in steps["path"] and "chunks" in chunks["path"]
    assert steps["kl_mean"] != chunks["kl_mean"], "two paths of other kernels do not agree in every bit"
    assert (code, found["passed"]) == (0, True), (steps["reason"], chunks["reason"])
    for model in found["flintc"]:
        assert model["perplexity"] == pytest.approx(found["perplexity_fp32"], rel=0.01)


@pytest.mark.parametrize(
    ("first", "second", "exact"),
    [
        ("reference/8", "cuda/8", False),
        ("cuda@baseline/8", "cuda/8", False),
        ("cuda/8", "cuda@residual-norm/2", False),
        ("cuda/8", "cuda/1", True),
        ("cuda/2", "cuda/8", True),
    ],
)
def test_two_runs_agree(form: str, first: str, second: str, exact: bool, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = said(capsys, "verify", str(FORMS[form]), "--bisect", "--run", first, "--run", second)
    assert (code, found["exact"], found["difference"]) == (0, exact, None)


def test_a_saved_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved by one run, read by another: the step is the first one's, caches and all."""
    saved = str(tmp_path / "trace.safetensors")
    flags = ("verify", str(EXAMPLE), "--bisect", "--run")
    code, _ = said(capsys, *flags, "reference@baseline/2", "--run", "cuda@baseline/8", "--save-trace", saved)
    assert code == 0
    code, found = said(capsys, *flags, saved, "--run", "cuda/4")
    assert (code, found["difference"]) == (0, None) and found["first"].startswith("reference@baseline/2")


def test_a_wrong_value_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch whose output is off by a few roundings, in one place of one layer."""
    right = CudaRunner.run

    def wrong(self, launch, values, env):  # type: ignore[no-untyped-def]
        made = right(self, launch, values, env)
        if "L5.a" in made:
            made["L5.a"][-1, 9] += 0.5
        return made

    monkeypatch.setattr(CudaRunner, "run", wrong)
    code, found = said(capsys, "verify", str(EXAMPLE), "--bisect", "--run", "reference/8", "--run", "cuda/8")
    assert (code, found["launch"], found["layer"]) == (1, "L5.attention_merge", 5)
    assert found["difference"]["place"][-1] == 9 and found["difference"]["wrong"] == 1


def test_the_reference_runs_where_the_weights_are() -> None:
    """One copy of the weights, on the GPU, serves kernels and reference; nothing of a step lies elsewhere."""
    subject = open_subject(EXAMPLE)
    runner, reference = subject.runner("cuda"), subject.runner("reference")
    assert subject.device == runner.device == reference.device == "cuda"
    assert subject.weights_on("cuda") is subject.weights
    inputs = prepare_step(subject, step_prompts(subject, make_prompts(subject, None)), filler(runner), runner.device)
    made = run_in_groups(reference, inputs, inputs.rows)
    assert {t.device.type for t in made.values()} == {"cuda"}
    launch = next(x for x in runner.graph.launches if x.role == "expert_down")
    assert all(d.passed for d in compare_launch(runner, launch, inputs, {**inputs.values, **made}))


def test_prefixes_cost_no_accuracy(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole prompts through the kernels of every prefix: none stands out."""
    code, found = said(capsys, "ablate", "tiny-flint", "--measure", str(FORMS[form]))
    steps = found["steps"]
    assert code == 0 and found["weights"] == form and len(steps) == 8
    assert steps[0]["kl_baseline"] == 0 and all(s["kl_positions"] == 64 * 200 for s in steps)
    least = min(step["kl_fp32"] for step in steps)
    assert least > 0 and max(step["kl_fp32"] for step in steps) < 1.5 * least
    assert max(step["kl_baseline"] for step in steps) < 3 * least


def test_the_oracle_holds_one_layer_on_the_device(tmp_path: Path) -> None:
    """Ten layers of experts of 50 MB each in FP32: the whole does not have to fit."""
    sizes = {"layers": 12, "hidden": 512, "experts": 32, "expert_width": 256}
    api.synth("tiny-flint", tmp_path / "wide", sizes=sizes)
    layer = 4 * 32 * 3 * 512 * 256
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits = Oracle(tmp_path / "wide", None, "cuda").logits([list(range(60)), list(range(40))], [torch.float32])
    assert [x.shape for (x,) in logits] == [(60, 512), (40, 512)]
    held = torch.cuda.max_memory_allocated() - before
    assert layer < held < 1.5 * layer + 64e6, "beside a layer: activations, the head, cuBLAS's own 32 MiB"
