"""``flintc bench forward`` on the device: what it reports is what the plan says and the profiler saw."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flintc import api
from flintc.bench import tune
from flintc.bench.ablation import ablate
from flintc.bench.limits import PROGRAMS, measure_limits
from flintc.bench.prefixes import measure_prefixes
from flintc.bench.step_report import measure_step
from flintc.bench.timeline import measure_timeline
from flintc.bench.turns import measure_turns
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
        few = kernel.programs <= torch.cuda.get_device_properties(0).multi_processor_count
        assert kernel.resident == 1 or not (few and plan.kernels[kernel.name].apart)


def test_bundles_are_timed_in_turn(tmp_path: Path) -> None:
    """With every pass and without the last: equal bits, and kernels that only one of them has."""
    target = api.gpu_target()
    assert target is not None
    folders = [tmp_path / name for name in ("whole", "joined")]
    api.compile("tiny-flint", target=target, out=folders[0])
    api.compile("tiny-flint", target=target, out=folders[1], disable_passes=["split-arrivals"])
    whole, joined = measure_turns(folders, 400, 2, 10, 3, ["topk", "linear"]).sides
    assert whole.launches > joined.launches
    assert joined.equal and joined.kl == 0
    assert len(whole.rounds) == len(joined.rounds) == 3 and all(0 < ms < 100 for ms in whole.rounds + joined.rounds)
    assert any(name.startswith("topk") for name in whole.alone_us)
    assert not any(name.startswith("topk") for name in joined.alone_us)


@pytest.mark.parametrize(("weights", "batch"), [("bf16", 1), ("nvfp4", 8)])
def test_hops_add_up_to_the_step(weights: str, batch: int, tmp_path: Path) -> None:
    found = measure_timeline("tiny-flint", weights, None, 400, batch, 9, tmp_path / "trace.json")
    plan = api.lower("tiny-flint", weights)
    assert [hop.launch for hop in found.hops] == [launch.name for launch in plan.body]
    assert all(hop.hop > 0 and 0 <= hop.work <= hop.slowest and hop.let_go <= hop.last_let_go for hop in found.hops)
    # The replays that are timed wait for the host in between, for up to a quarter of so short a step; those whose hops
    # are read are others, and beside other work on the GPU they may be the longer ones.
    assert 0.5 < sum(hop.hop for hop in found.hops) / (found.stamped_ms * 1e3) < 1.1
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 2 * len(found.hops)


def test_tuning_times_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "CANDIDATES", {"w2r128": Schedule(2, 128)})
    tuned = tune.tune(bind_defaults(load_spec("tiny-flint")), "bf16", 512)
    assert {t.kernel.split("_")[0] for t in tuned} == {"linear", "gate", "expert"}
    assert all(0 < trial.us < 1000 for t in tuned for trial in (t.rules, *t.trials))


def test_prefixes_are_measured_each_by_itself() -> None:
    """Two of them: what is unfused, and what the first pass makes of it."""
    model = bind_defaults(load_spec("tiny-flint"))
    whole = ablate(api.run_passes(model, "nvfp4"), context=512)
    first = replace(whole, steps=whole.steps[:2])
    ceiling, found = measure_prefixes(model, first, repeats=10)
    assert ceiling > 1e12
    assert [(name, m.launches) for name, m in found.items()] == [(s.name, s.launches) for s in first.steps]
    assert all(0 < m.seconds <= m.p99_seconds < 0.1 for m in found.values())
    baseline, after = found.values()
    assert baseline.kl_baseline == 0
    assert 0 <= after.kl_baseline < 1e-3


def test_a_step_is_taken_apart() -> None:
    found = measure_limits("tiny-flint", "nvfp4", None, 400)
    assert list(found.attention) == [1, 2, 16, 50, 100, 200, 300, 400]
    assert all(0 < us < 1000 for us in found.attention.values())
    assert 0 < found.layer < 1000 and 0 < found.layer_cached < 1000
    assert list(found.reads) == list(PROGRAMS)
    assert all(nbytes >= 0 and us > 0 for nbytes, us in found.reads.values())
