"""``flintc bench forward`` on the device: what it reports is what the plan says and the profiler saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flintc import api
from flintc.bench import tune
from flintc.bench.step_report import measure_step
from flintc.bundle import load_bundle
from flintc.codegen.schedule import Schedule
from flintc.spec import bind_defaults, load_spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("weights", "batch"), [("bf16", 1), ("nvfp4", 8)])
def test_a_step_is_reported(weights: str, batch: int, tmp_path: Path) -> None:
    """At the last position that fits, where a step too far would leave the tables."""
    target = api.gpu_target()
    assert target is not None
    api.compile("tiny-flint", weights=weights, target=target, out=tmp_path / "bundle")
    plan = load_bundle(tmp_path / "bundle").plan
    trace = tmp_path / "trace.json"
    report = measure_step("tiny-flint", weights, tmp_path / "bundle", 512, batch, 10, trace)
    assert report.launches == len(plan.launches) == len(json.loads(trace.read_text())["traceEvents"])
    assert [part.name for part in report.parts] == ["body", "logits", "tokens"]
    assert {k.name for k in report.kernels} == {launch.kernel for launch in plan.launches}
    assert sum(k.launches for k in report.kernels) == len(plan.launches)
    for kernel in report.kernels:
        assert 0 < kernel.alone_us < 1000
        assert 0 < kernel.share < 1
        assert kernel.programs >= 1
        assert kernel.resident >= 1


def test_tuning_times_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "CANDIDATES", {"w2r128": Schedule(2, 128)})
    tuned = tune.tune(bind_defaults(load_spec("tiny-flint")), "bf16", 512)
    assert {t.kernel.split("_")[0] for t in tuned} == {"qkv", "linear", "gate", "expert"}
    assert all(0 < trial.us < 1000 for t in tuned for trial in (t.rules, *t.trials))
