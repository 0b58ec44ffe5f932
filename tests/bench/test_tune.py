"""Schedules and the choice between them; timing itself needs a GPU (tests/gpu/test_gpu_bench.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from graphs import pipeline

from flintc import api
from flintc.bench import tune
from flintc.bench.tune import Trial, Tuned, write_entries
from flintc.codegen.cache import package_digest
from flintc.codegen.planner import plan
from flintc.codegen.schedule import Schedule, schedule_of, stored, trying
from flintc.errors import BackendError, UsageError
from flintc.ir.plan import Effect
from flintc.ir.serialize import plan_from_json, plan_to_json
from flintc.safety import find_hazards
from flintc.spec import bind_defaults, load_spec


def tuned(*trials: tuple[str, float, float], warps: dict[str, int] | None = None) -> Tuned:
    """Of 8 warps where ``warps`` says nothing else, and of the registers 100, 101, ... in order."""
    rules, *others = (Trial(n, (warps or {}).get(n, 8), 100 + i, *us) for i, (n, *us) in enumerate(trials))
    return Tuned("qkv_5120x2048", "3.7.1", rules, tuple(others))


def test_the_quickest_wins() -> None:
    assert tuned(("rules", 8.0, 9.0), ("a", 7.0, 9.0), ("b", 6.0, 9.1)).best.candidate == "b"


def test_a_layout_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is what the rules say anyway would differ from them by noise alone."""
    monkeypatch.setattr(tune, "CANDIDATES", {"w2r112": Schedule(2, 112), "w4r112": Schedule(4, 112)})
    with trying(Schedule(2, 112)):
        bundle = api.compile("tiny-flint", target="sm_90")
    name = next(planned.kernel for planned in bundle.plan.launches if planned.name == "L1.qkv")
    assert tune._is_new(bundle, name, "w2r112", {"rules": Trial("rules", 2, 128, 1.0, 1.0)})
    assert not tune._is_new(bundle, name, "w2r112", {"rules": Trial("rules", 2, 112, 1.0, 1.0)})
    assert not tune._is_new(bundle, name, "w4r112", {})


def test_noise_changes_nothing() -> None:
    assert tuned(("rules", 8.0, 9.0), ("a", 7.9, 8.0)).best.candidate == "rules"


def test_eight_rows_may_not_pay_for_one() -> None:
    assert tuned(("rules", 8.0, 9.0), ("a", 5.0, 12.0), warps={"a": 4}).best.candidate == "rules"


def test_eight_rows_have_a_budget_of_their_own() -> None:
    """Where as many warps give the same bits."""
    found = tuned(("rules", 8.0, 9.0), ("a", 5.0, 12.0), ("b", 9.0, 6.0))
    assert (found.best.candidate, found.best_of_eight.candidate) == ("a", "b")
    found = tuned(("rules", 8.0, 9.0), ("a", 5.0, 9.0), ("b", 9.0, 6.0), warps={"a": 4})
    assert (found.best.candidate, found.best_of_eight.candidate) == ("a", "a")
    assert tuned(("rules", 8.0, 9.0), ("a", 8.0, 8.9)).best_of_eight.candidate == "rules"


def test_entries_say_what_differs_from_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    same = tuned(("rules", 8.0, 9.0), ("a", 8.0, 9.0))
    eight = tuned(("rules", 8.0, 9.0), ("a", 9.0, 6.0))
    one = tuned(("rules", 8.0, 9.0), ("a", 5.0, 9.0), warps={"a": 4})
    both = tuned(("rules", 8.0, 9.0), ("a", 5.0, 12.0))
    figures = {"measured", "us", "rules_us"}
    assert tune.entries((same,)) == {}
    assert entry_of(eight, figures) == {"several": 101, "us_of_eight": 6.0, "rules_us_of_eight": 9.0}
    assert entry_of(one, figures) == {"warps": 4, "registers": 101}
    assert entry_of(both, figures) == {
        "warps": 8, "registers": 101, "several": 100, "us_of_eight": 9.0, "rules_us_of_eight": 9.0
    }  # fmt: skip


def entry_of(found: Tuned, without: set[str]) -> dict[str, object]:
    (entry,) = tune.entries((found,)).values()
    assert entry["measured"].endswith(", a GPU, Triton 3.7.1")
    return {name: value for name, value in entry.items() if name not in without}


def test_a_budget_for_several_rows_is_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = pipeline("tiny-flint").graph
    ruled = plan(graph)
    name = next(n for n in ruled.kernels if n.startswith("route_"))
    monkeypatch.setattr("flintc.codegen.schedule.stored", lambda: {name: {"several": 96}})
    told = plan(graph)
    several = told.kernels[f"{name}_several"]
    assert told.kernels[name] == replace(ruled.kernels[name], several=several.name)
    assert (several.max_registers, several.several) == (96, None)
    assert several.source == told.kernels[name].source.replace(name, several.name)
    launch = next(x for x in told.launches if x.kernel == name)
    assert [told.kernel_for(launch, rows).name for rows in (1, 2, 8)] == [name, several.name, several.name]
    assert find_hazards(told) == []
    stray = (Effect("wait"), Effect("read", "nowhere_ptr"))
    (wrong_path,) = find_hazards(
        replace(told, kernels={**told.kernels, several.name: replace(several, paths=(stray,))})
    )[:1]
    assert wrong_path.message == f"kernel {several.name} follows nowhere_ptr, which is no pointer"
    for change in ({"params": several.params[1:]}, {"paths": ()}, {"constants": {}}, {"waits": False}, None):
        others = {several.name: replace(several, **change)} if change else {}
        wrong = {n: k for n, k in told.kernels.items() if k is not several} | others
        assert {h.message for h in find_hazards(replace(told, kernels=wrong))} == {
            f"kernel {several.name} is to run in place of {name}, and does not fit its launches"
        }
    assert plan_from_json(plan_to_json(told)) == told


def test_what_runs_of_several_rows_is_proved_by_itself() -> None:
    """A wait left out, or a load raised above it, in either of two kernels that serve the same launch."""
    whole = plan(pipeline("tiny-flint").graph)
    assert find_hazards(whole) == []
    down = next(k for k in whole.kernels.values() if k.name.startswith("expert_down_") and k.several)
    assert down.several is not None
    for name in (down.name, down.several):
        kernel = whole.kernels[name]
        early = replace(kernel, paths=tuple(tuple(e for e in p if e.kind != "wait") for p in kernel.paths))
        hazards = find_hazards(replace(whole, kernels={**whole.kernels, name: early}))
        assert {h.rule for h in hazards} >= {"attribute", "order"}
    # The order of one row's loads is safe after the trigger of one row only.
    ahead = replace(whole.kernels[down.several], paths=down.paths)
    hazards = find_hazards(replace(whole, kernels={**whole.kernels, down.several: ahead}))
    assert {h.rule for h in hazards} == {"load-above-wait"}
    assert all(h.value.endswith((".chosen", ".mix")) for h in hazards)


def test_a_kernel_is_laid_out_as_it_is_told() -> None:
    graph = pipeline("tiny-flint").graph
    with trying(Schedule(warps=2, registers=112)):
        told = plan(graph).kernels
    made = plan(graph)
    ruled, name = made.kernels, next(planned.kernel for planned in made.launches if planned.name == "L1.qkv")
    assert (told[name].num_warps, told[name].constants["SPLIT"], told[name].max_registers) == (2, 2, 112)
    assert ruled[name].num_warps != 2
    assert told["add_norm_128"] == ruled["add_norm_128"]


def test_entries_name_kernels_of_flint() -> None:
    kernels = {k for w in ("bf16", "nvfp4") for k in plan(pipeline("flint", w).graph).kernels}
    assert set(stored()) <= kernels
    for name, entry in stored().items():
        told = schedule_of(name)
        assert told == Schedule(entry.get("warps"), entry.get("registers"), entry.get("several"))
        assert told != Schedule()
        assert (entry["us"] < entry["rules_us"]) == (told.warps is not None or told.registers is not None)
        assert told.several is None or entry["us_of_eight"] < entry["rules_us_of_eight"]
        assert entry["measured"]


def test_a_file_keeps_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "sm_90.yaml"
    file.write_text("# Why this file is here.\n")
    write_entries(file, {"a": {"warps": 4, "registers": 0}})
    write_entries(file, {"b": {"warps": 2, "registers": 128}})
    assert file.read_text().startswith("# Why this file is here.\n")
    assert yaml.safe_load(file.read_text()) == {
        "a": {"warps": 4, "registers": 0}, "b": {"warps": 2, "registers": 128}
    }  # fmt: skip


@pytest.mark.parametrize("text", ["- a list", "a: [", "word"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"x\.yaml: not a schedule file"):
        write_entries(file, {"a": {}})
    assert file.read_text() == text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sm_90.yaml"
    write_entries(file, {"a": {"warps": 4}})
    before = file.read_text()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_entries(file, {"b": {"warps": 2}})
    assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


def test_a_stored_entry_lays_a_kernel_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = pipeline("tiny-flint").graph
    made = plan(graph)
    ruled, name = made.kernels, next(planned.kernel for planned in made.launches if planned.name == "L1.qkv")
    monkeypatch.setattr("flintc.codegen.schedule.stored", lambda: {name: {"warps": 2, "registers": None}})
    told = plan(graph).kernels
    assert (told[name].num_warps, ruled[name].num_warps != 2) == (2, True)
    assert {n for n in told if told[n] != ruled.get(n)} == {name, f"{name}_several"}


@pytest.mark.parametrize("name", ["schedules/sm_90.yaml", "families/gemv.py", "templates/gemv.py.j2"])
def test_what_lays_kernels_out_is_part_of_a_cached_bundles_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "codegen" / name
    file.parent.mkdir(parents=True)
    file.write_text("a: 1")
    monkeypatch.setattr("flintc.codegen.cache.__file__", str(tmp_path / "codegen" / "cache.py"))
    before = package_digest()
    file.write_text("a: 2")
    assert package_digest() != before


def test_candidates_are_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "CANDIDATES", {"w2r128": Schedule(2, 128)})
    tune.prepare(bind_defaults(load_spec("tiny-flint")), "bf16", "sm_90", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rules", "w2r128"]


def test_an_unknown_candidate_is_named() -> None:
    with pytest.raises(UsageError, match="no candidate is called w3"):
        tune.candidates_called(["w3"])


def test_timing_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    with pytest.raises(BackendError, match="needs a GPU"):
        tune.tune(bind_defaults(load_spec("tiny-flint")), "bf16", 512)
