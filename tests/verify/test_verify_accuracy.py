"""The KL columns of the ablation: what each pass costs on real text, with the generated kernels."""

from __future__ import annotations

import pytest

from flintc import api
from flintc.bench import accuracy
from flintc.bench.ablation import ablate, ablation_table
from flintc.bench.report import render_report
from flintc.bench.subject import Subject, open_subject
from flintc.spec import bind_defaults, load_spec


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = tmp_path_factory.mktemp("accuracy") / "model"
    api.synth("tiny-flint", path, demo_tokenizer=True)
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


def test_columns_of_table_and_report() -> None:
    run = api.run_passes(bind_defaults(load_spec("tiny-flint")))
    plain = ablate(run, context=100)
    measured = plain.measured("residual-norm", kl_fp32=1.5e-4, kl_baseline=2.5e-7)
    assert not plain.has_accuracy and measured.has_accuracy
    assert "1.50e-04" in render_report(measured, run) and "KL from" not in render_report(plain, run)
    assert len(ablation_table(measured).renderables) == len(ablation_table(plain).renderables) + 1
    assert measured.to_json()["steps"][1]["kl_baseline"] == 2.5e-7
