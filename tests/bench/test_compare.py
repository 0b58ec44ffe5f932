"""The comparison with transformers: its figures, the bundles it takes, and what it says where it cannot run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import OTHER, pipeline

from flintc import api
from flintc.bench import compare
from flintc.bench.ablation import ablate
from flintc.bench.compare import (
    COMPILED,
    EAGER,
    FUSED,
    UNFUSED,
    Comparison,
    Row,
    checked,
    measure_bundle,
    measure_comparison,
)
from flintc.bench.decode import measure_decode
from flintc.bench.limits import measure_limits
from flintc.bench.prefill import measure_prefill
from flintc.bench.step_report import measure_step
from flintc.bench.timing import StepFigures, Timing
from flintc.bundle import Bundle, Origin, build_bundle, write_bundle
from flintc.codegen.planner import plan
from flintc.errors import BackendError, BundleError, FlintcError, MeasurementError, UsageError, VerificationError
from flintc.ir.plan import CompiledKernel, Plan
from flintc.passes import PASSES
from flintc.spec import BoundModel, bind_defaults, load_spec

TINY = bind_defaults(load_spec("tiny-flint"))
GIVEN = {
    EAGER: StepFigures(120.0, 4000, None, "attention eager"),
    COMPILED: StepFigures(30.0, 900, None, "attention eager"),
    UNFUSED: StepFigures(5.0, 160, 4_000_000_000, "Triton 3.7.1"),
    FUSED: StepFigures(2.5, 58, 3_750_000_000, "Triton 3.7.1"),
}


def bundle_of(model: BoundModel = TINY, passes: Sequence[str] = tuple(PASSES), weights: Any = "bf16") -> Bundle:
    """A bundle as far as anything is read that is no machine code."""
    left_out = [name for name in PASSES if name not in passes]
    made = plan(api.run_passes(model, weights, left_out).graph)
    compiled = {
        (name, "sm_90"): CompiledKernel(name, "sm_90", "entry", (), 4, 0, 32, 0, 0, b"", "")
        for name in made.all_kernels
    }
    origin = Origin(model.spec.name, model.spec.sha256, weights, tuple(passes), (1,))
    return replace(build_bundle(made, compiled, origin), path=Path("folder"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], float | None]]:
    """A machine that seems to have a GPU, and gives the figures above; the calls that were made."""
    calls: list[tuple[str, tuple[Any, ...], float | None]] = []

    def given(call: Any, *args: Any, limit: float | None = None) -> StepFigures | float:
        if call is compare.read_ceiling:
            return 4e12
        calls.append((call.__name__, args, limit))
        if call.__name__ == "measure_transformers":
            return GIVEN[COMPILED if args[-1] else EAGER]
        return GIVEN[FUSED if args[0].name == "fused" else UNFUSED]

    monkeypatch.setattr("flintc.api.gpu_target", lambda: "sm_90")
    monkeypatch.setattr("flintc.bench.built.load_driver", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(compare, "run_apart", given)
    return calls


def measure(folder: Path, limit: float | None = 60.0) -> Comparison:
    write_bundle(bundle_of(), folder / "fused")
    write_bundle(bundle_of(passes=()), folder / "unfused")
    return measure_comparison("tiny-flint", folder / "fused", folder / "unfused", 100, 7, limit)


def test_rows_in_one_run(here: list[tuple[str, tuple[Any, ...], float | None]], tmp_path: Path) -> None:
    found = measure(tmp_path)
    assert found.rows == tuple(Row(name, figures) for name, figures in GIVEN.items())
    assert (found.spec, found.context, found.gpu, found.ceiling) == ("tiny-flint", 100, "Some GPU", 4e12)
    assert [found.ratio(row) for row in found.rows] == [48.0, 12.0, 2.0, 1.0]
    assert [found.rate(row) for row in found.rows] == [None, None, 8e11, 1.5e12]
    assert [found.share(row) for row in found.rows] == [None, None, 0.2, 0.375]
    built = bundle_of().manifest.versions["triton"]
    assert found.versions == {"torch": torch.__version__, "transformers": version("transformers"), "triton": built}


def test_every_row_is_of_the_token_after_as_many_cached_ones(
    here: list[tuple[str, tuple[Any, ...], float | None]], tmp_path: Path
) -> None:
    """Transformers is told how many are cached, a bench of flintc how many the token attends to, itself included."""
    measure(tmp_path)
    (_, eager, no_limit), (_, compiled, limit), (_, unfused, _), (_, fused, _) = here
    assert eager[1:] == (100, 7, False) and compiled[1:] == (100, 7, True)
    assert (no_limit, limit) == (None, 60.0)
    assert eager[0]["hidden_size"] == TINY.dims["hidden"]
    assert unfused == (tmp_path / "unfused", "sm_90", 101, TINY.numbers["rope_theta"])
    assert fused == (tmp_path / "fused", "sm_90", 101, TINY.numbers["rope_theta"])


def test_the_compiled_row_is_left_out_on_request(
    here: list[tuple[str, tuple[Any, ...], float | None]], tmp_path: Path
) -> None:
    assert [row.name for row in measure(tmp_path, None).rows] == [EAGER, UNFUSED, FUSED]
    assert all(args[-1] is not True for _, args, _ in here)


def failing(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    compiled: bool | None = None,
    error: FlintcError | None = None,
) -> None:
    """Have one kind of row fail."""
    given = compare.run_apart

    def fail(call: Any, *args: Any, limit: float | None = None) -> StepFigures:
        if call.__name__ == name and compiled in (None, args[-1]):
            raise error or MeasurementError("not done after 60 s")
        return given(call, *args, limit=limit)

    monkeypatch.setattr(compare, "run_apart", fail)


@pytest.mark.usefixtures("here")
def test_what_goes_wrong_in_the_compiled_row_is_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "measure_transformers", compiled=True)
    found = measure(tmp_path)
    assert found.rows[1] == Row(COMPILED, None, "not done after 60 s")
    assert (found.ratio(found.rows[1]), found.rate(found.rows[1]), found.share(found.rows[1])) == (None, None, None)
    assert [row.figures for row in found.rows if row.name != COMPILED] == [GIVEN[x] for x in (EAGER, UNFUSED, FUSED)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "compiled", "row"), [("measure_transformers", False, EAGER), ("measure_bundle", None, UNFUSED)]
)
def test_what_goes_wrong_in_another_row_is_an_error(
    name: str, compiled: bool | None, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, name, compiled)
    with pytest.raises(MeasurementError, match=f"^{row}: not done after 60 s$"):
        measure(tmp_path)


@pytest.mark.usefixtures("here")
def test_a_finding_keeps_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "measure_bundle", error=VerificationError("the profiler counts 3 launches"))
    with pytest.raises(VerificationError, match=r"^the profiler counts 3 launches$"):
        measure(tmp_path)


@pytest.mark.usefixtures("here")
def test_json_holds_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "measure_transformers", compiled=True)
    got = json.loads(json.dumps(measure(tmp_path).to_json()))
    assert {k: got[k] for k in ("spec", "weights", "context", "batch", "gpu", "read_ceiling_bytes_per_second")} == {
        "spec": "tiny-flint", "weights": "bf16", "context": 100, "batch": 1, "gpu": "Some GPU",
        "read_ceiling_bytes_per_second": 4e12,
    }  # fmt: skip
    eager, compiled, _, fused = got["rows"]
    assert eager == {
        "name": EAGER, "ms": 120.0, "launches": 4000, "bytes": None, "bytes_per_second": None,
        "share_of_ceiling": None, "times_fused": 48.0, "how": "attention eager", "failure": None,
    }  # fmt: skip
    assert (compiled["ms"], compiled["times_fused"], compiled["failure"]) == (None, None, "not done after 60 s")
    assert (fused["bytes"], fused["share_of_ceiling"], fused["times_fused"]) == (3_750_000_000, 0.375, 1.0)


def test_the_bundle_of_the_comparison_is_taken() -> None:
    for passes in (tuple(PASSES), ()):
        bundle = bundle_of(passes=passes)
        assert checked(bundle, TINY, "sm_90", passes) is bundle


def test_a_bundle_after_other_passes_is_refused() -> None:
    with pytest.raises(UsageError, match="compiled after no pass: here tiny-flint is compared after residual-norm, "):
        checked(bundle_of(passes=()), TINY, "sm_90", tuple(PASSES))
    with pytest.raises(UsageError, match="split-arrivals: here tiny-flint is compared after no pass"):
        checked(bundle_of(), TINY, "sm_90", ())


@pytest.mark.usefixtures("here")
def test_a_bundle_at_other_sizes_is_refused(tmp_path: Path) -> None:
    write_bundle(bundle_of(api._resized(load_spec("tiny-flint"), {"layers": 3})), tmp_path / "small")
    with pytest.raises(UsageError, match="small does not run tiny-flint at the sizes asked for"):
        measure_comparison("tiny-flint", tmp_path / "small", None, 100, 5, None)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "measure",
    [
        lambda folder: measure_prefill("flint", "bf16", folder, [8], None, 1),
        lambda folder: measure_decode("flint", "bf16", folder, 100, [1], 1),
        lambda folder: measure_step("flint", "bf16", folder, 100, 1, 10, None),
        lambda folder: measure_limits("flint", "bf16", folder, 100),
    ],
    ids=["prefill", "generate", "forward", "limits"],
)
def test_no_bench_gives_the_figures_of_another_model(measure: Callable[[Path], Any], tmp_path: Path) -> None:
    write_bundle(bundle_of(), tmp_path / "tiny")
    with pytest.raises(UsageError, match=r"tiny does not run flint at the sizes asked for: .* from tiny-flint$"):
        measure(tmp_path / "tiny")


def test_a_bundle_for_another_gpu_is_refused() -> None:
    with pytest.raises(BundleError, match="built for sm_90, not for sm_100"):
        checked(bundle_of(), TINY, "sm_100", tuple(PASSES))


@pytest.mark.usefixtures("here")
def test_a_bundle_for_other_weights_is_refused(tmp_path: Path) -> None:
    write_bundle(bundle_of(weights="nvfp4"), tmp_path / "packed")
    with pytest.raises(UsageError, match="packed is for nvfp4 weights, not bf16"):
        measure_comparison("tiny-flint", tmp_path / "packed", None, 100, 5, None)


@pytest.mark.usefixtures("here")
def test_the_baseline_is_compiled_with_no_pass_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(bundle_of(), tmp_path / "fused")
    asked: list[dict[str, Any]] = []

    def compile(model: BoundModel, **how: Any) -> Bundle:
        asked.append(how)
        return bundle_of(model, [name for name in PASSES if name not in how["disable_passes"]])

    monkeypatch.setattr("flintc.api.compile", compile)
    found = measure_comparison("tiny-flint", tmp_path / "fused", None, 100, 5, None)
    assert [row.name for row in found.rows] == [EAGER, UNFUSED, FUSED]
    assert asked == [{"weights": "bf16", "target": "sm_90", "disable_passes": TINY.spec.pipeline}]


class FakeBench:
    """Stands for the GPU: 2 ms a step, and as many launches as the test says."""

    launches = 0

    def __init__(self, plan: Plan, compiled: Any, context: int, theta: float) -> None:
        assert set(compiled) == set(plan.all_kernels)
        assert (context, theta) == (101, 1e4)

    def time(self, part: str) -> Timing:
        assert part == "body"
        return Timing((1.0, 2.0, 9.0))

    def profiled_launches(self, part: str) -> int:
        assert part == "body"
        return self.launches


def test_a_bundles_row_is_the_step_without_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = write_bundle(bundle_of(), tmp_path / "fused")
    graph = bundle.plan.graph
    monkeypatch.setattr(compare, "ForwardBench", FakeBench)
    monkeypatch.setattr(FakeBench, "launches", len(graph.body))
    found = measure_bundle(tmp_path / "fused", "sm_90", 101, 1e4)
    (step,) = (s for s in ablate(pipeline("tiny-flint"), context=101).steps if s.name == list(PASSES)[-1])
    assert found == StepFigures(2.0, step.launches, step.cost.bytes, f"Triton {bundle.manifest.versions['triton']}")
    monkeypatch.setattr(FakeBench, "launches", len(graph.launches))
    with pytest.raises(VerificationError, match=f"the profiler counts {len(graph.launches)} launches, the plan has"):
        measure_bundle(tmp_path / "fused", "sm_90", 101, 1e4)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    with pytest.raises(BackendError, match="comparing needs a GPU"):
        measure_comparison("tiny-flint", None, None, 100, 5, None)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "flintc.bench.transformers_step", raising=False)
    monkeypatch.delattr("flintc.bench.transformers_step", raising=False)
    with pytest.raises(BackendError, match=r"comparing needs transformers 5\.24: .*flintc\[verify\]"):
        measure_comparison("tiny-flint", None, None, 100, 5, None)


def test_a_model_that_transformers_lacks() -> None:
    with pytest.raises(UsageError, match="is not a model that transformers has"):
        measure_comparison(OTHER, None, None, 100, 5, None)
