"""The KL columns of the ablation: what each pass costs on real text, with the generated kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flintc import api
from flintc.bench import accuracy
from flintc.bench.ablation import ablate, ablation_table
from flintc.bench.report import render_report
from flintc.bench.subject import Subject, open_subject
from flintc.cli import run
from flintc.spec import bind_defaults, load_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
#: Small, so that the interpreter runs it twice in seconds; the trained model is measured by hand, see docs/numerics.md.
SIZES = {
    "layers": 3, "hidden": 64, "vocab": 300, "heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 4,
    "experts_per_token": 2, "dense_width": 64, "expert_width": 16, "shared_width": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = tmp_path_factory.mktemp("accuracy") / "model"
    api.synth("tiny-flint", path, sizes=SIZES, demo_tokenizer=True)
    return open_subject(path, spec="tiny-flint")


def test_a_pass_costs_rounding_and_no_more(subject: Subject) -> None:
    """The interpreted kernels of the unfused graph and of the whole pipeline, in a step of eight rows."""
    last = subject.model.spec.pipeline[-1]
    found = accuracy.measure_accuracy(subject, ["baseline", last], "interpret")
    assert found["baseline"].kl_baseline == 0 and found[last].positions == 8
    assert found[last].kl_baseline < 1e-3
    assert 0 < found[last].kl_fp32 < 0.02


def test_a_costly_pass_shows(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits after a pass that are a little off stand out, against FP32 and against the baseline."""
    right = accuracy._logits

    def wrong(subject: Subject, backend: str, after: str, *rest: object) -> list:
        made = right(subject, "reference", after, *rest)  # type: ignore[arg-type]
        return made if after == "baseline" else [x * 1.05 for x in made]

    monkeypatch.setattr(accuracy, "_logits", wrong)
    found = accuracy.measure_accuracy(subject, ["baseline", "residual-norm"], "interpret")
    assert found["residual-norm"].kl_baseline > 1e-3
    assert found["residual-norm"].kl_fp32 > 2 * found["baseline"].kl_fp32


@pytest.mark.parametrize(("checkpoint", "weights"), [(EXAMPLE, "bf16"), (EXAMPLE / "tiny-flint.gguf", "nvfp4")])
def test_columns_on_the_command_line(
    checkpoint: Path, weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trained model, at its own sizes and weight format; the reference in place of the interpreter."""
    right = accuracy._logits
    monkeypatch.setattr(accuracy, "_logits", lambda subject, backend, *rest: right(subject, "reference", *rest))
    argv = ["ablate", "tiny-flint", "--measure", str(checkpoint)]
    assert run([*argv, "--json", "--disable-pass", "dependent-launch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"] == weights and len(found["steps"]) == 7
    for step in found["steps"]:
        assert len(step["launches_per_layer"]) == 8
        assert 0 < step["kl_fp32"] < 0.02 and step["kl_baseline"] == 0 and step["kl_positions"] == 8
    other = {"bf16": "nvfp4", "nvfp4": "bf16"}[weights]
    assert run([*argv, "--weights", other]) == 2
    assert f"are {weights}, not {other}" in capsys.readouterr().err
    assert run([*argv, "--for", "elsewhere"]) == 2
    assert "two checkpoints" in capsys.readouterr().err


def test_columns_of_table_and_report() -> None:
    run = api.run_passes(bind_defaults(load_spec("tiny-flint")))
    plain = ablate(run, context=100)
    measured = plain.measured("residual-norm", kl_fp32=1.5e-4, kl_baseline=2.5e-7, kl_positions=8)
    assert not plain.has_accuracy and measured.has_accuracy
    assert "1.50e-04" in render_report(measured, run) and "KL from" not in render_report(plain, run)
    assert len(ablation_table(measured).renderables) == len(ablation_table(plain).renderables) + 1
    assert measured.to_json()["steps"][1]["kl_baseline"] == 2.5e-7
