"""`flintc bench bundles` without a GPU: which bundles may be timed against each other, and what is said of figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compare import bundle_of

from flintc import api
from flintc.bench.turns import Side, Turns, measure_turns, open_sides
from flintc.bundle import write_bundle
from flintc.errors import BackendError, UsageError
from flintc.spec import bind_defaults, load_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bundle(bundle_of(), tmp_path / "first")
    return tmp_path


def test_bundles_of_one_model_are_opened_whatever_their_passes(folder: Path) -> None:
    write_bundle(bundle_of(passes=()), folder / "other")
    first, other = open_sides([folder / "first", folder / "other"])
    assert len(first.plan.launches) < len(other.plan.launches)


def test_bundles_of_other_sizes_or_weights_are_refused(folder: Path) -> None:
    write_bundle(bundle_of(api._resized(load_spec("tiny-flint"), {"layers": 3})), folder / "small")
    write_bundle(bundle_of(weights="nvfp4"), folder / "packed")
    spec = load_spec("tiny-flint")
    numerics = spec.numerics.model_copy(update={"kv_page": 16})
    write_bundle(bundle_of(bind_defaults(spec.model_copy(update={"numerics": numerics}))), folder / "paged")
    for other, what in (("small", "weight L3"), ("packed", "weight L0"), ("paged", "L0.cache")):
        with pytest.raises(
            UsageError, match=f"first and .*{other} are of two models: {what}.* in the first, .* in the"
        ):
            open_sides([folder / "first", folder / other])


def test_one_bundle_is_too_few(folder: Path) -> None:
    with pytest.raises(UsageError, match="nothing to be timed against"):
        open_sides([folder / "first"])


def test_a_kernel_that_neither_has_is_told_before_anything_is_timed(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no kernel is called tpok \(kernels: .*topk"):
        measure_turns([folder / "first"] * 2, 100, 1, 10, 1, ["topk", "tpok"])


def test_it_needs_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    with pytest.raises(BackendError, match="needs a GPU"):
        measure_turns([folder / "first"] * 2, 100, 1, 10, 1, ())


def test_the_middle_turn_counts() -> None:
    side = Side("a", 3, (1.5, 1.0, 1.25), True, 0.0, {})
    assert side.ms == 1.25
    data = Turns("flint", "bf16", 1, 1, "a GPU", 4e12, (side,)).to_json()
    assert data["sides"][0]["ms"] == 1.25 and data["sides"][0]["rounds"] == (1.5, 1.0, 1.25)
