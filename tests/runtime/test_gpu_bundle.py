"""What a load on a GPU runs: the bundle given, or one compiled on first use; and what does not fit is refused."""

import sys
from dataclasses import replace

import pytest

import flintc
from flintc import api
from flintc.building import Recipe
from flintc.bundle import load_bundle
from flintc.codegen.schedule import Schedule, trying
from flintc.errors import BackendError, BundleError, CapacityError, CheckpointError, FlintcWarning
from flintc.runtime.cuda.capacity import RESERVE, pool_pages, symbols_of, workspace_bytes
from flintc.runtime.kv import KvLayout
from flintc.runtime.loading import check_fit
from flintc.spec import bind_defaults, load_spec


@pytest.fixture
def gpu(monkeypatch):
    """A machine that seems to have an sm_90 GPU."""
    monkeypatch.setattr("flintc.api.gpu_target", lambda: "sm_90")


def tiny():
    return bind_defaults(load_spec("tiny-flint"))


def test_compiled_on_first_use_then_cached(gpu, own_cache):
    told = []
    first = api._gpu_bundle(None, tiny(), "bf16", lambda *update: told.append(update))
    assert first.manifest.targets == ("sm_90",)
    assert first.plan.sampler is not None
    assert len(told) == len(first.plan.all_kernels)
    again = api._gpu_bundle(None, tiny(), "bf16", lambda *update: pytest.fail("compiled again"))
    assert (again.manifest, again.path) == (first.manifest, first.path)
    assert [p.name for p in (own_cache / "bundles").iterdir()] == [first.path.name]


def test_a_damaged_bundle_in_the_cache_is_made_again(gpu, own_cache):
    first = api._gpu_bundle(None, tiny(), "bf16", None)
    (first.path / "plan.json").write_text("{}")
    assert api._gpu_bundle(None, tiny(), "bf16", None).manifest == first.manifest
    assert load_bundle(first.path).manifest == first.manifest


def test_a_cache_that_cannot_be_written_loses_no_work(gpu, own_cache):
    (own_cache / "bundles").write_text("in the way of the folder")
    with pytest.warns(FlintcWarning, match="used, but not kept: cannot write the bundle .*: File exists"):
        made = api._gpu_bundle(None, tiny(), "bf16", None)
    assert made.for_target("sm_90")


def test_what_a_bundle_depends_on_is_in_its_key(monkeypatch):
    own = Recipe(tiny(), "bf16", ("sm_90",), (1,))
    others = [
        replace(own, model=api._resized(load_spec("tiny-flint"), {"layers": 3})),
        replace(own, weights="nvfp4"),
        replace(own, targets=("sm_100",)),
        replace(own, targets=("sm_90", "sm_100")),
        replace(own, batches=(1, 2)),
        replace(own, disabled=("dependent-launch",)),
    ]
    keys = [recipe.key for recipe in (own, *others)]
    with trying(Schedule(warps=2)):
        keys.append(replace(own).key)
    with monkeypatch.context() as patch:
        patch.setattr("flintc.building.package_digest", lambda: "another text")
        keys.append(replace(own).key)
    with monkeypatch.context() as patch:
        patch.setattr("flintc.building.version", lambda package: "3.0")
        keys.append(replace(own).key)
    assert len(set(keys)) == len(keys)
    assert replace(own, model=tiny()).key == own.key
    several = replace(own, targets=("sm_100", "sm_90"), disabled=("b", "a"))
    assert several.key == replace(several, targets=("sm_90", "sm_100"), disabled=("a", "b")).key


def test_what_is_edited_while_a_bundle_is_made_does_not_name_it(own_cache, monkeypatch):
    text = ["old"]
    monkeypatch.setattr("flintc.building.package_digest", lambda: text[0])
    monkeypatch.setattr("flintc.safety.check_plan", lambda plan: text.append(text.pop() + " edited"))
    made = Recipe(tiny(), "bf16", ("sm_90",), (1,)).bundle()
    text[:] = ["old"]
    assert Recipe(tiny(), "bf16", ("sm_90",), (1,)).folder == made.path


def test_a_gpu_outside_the_bundles_targets(gpu, own_cache, monkeypatch):
    bundle = flintc.compile("tiny-flint", target="sm_90")
    assert api._gpu_bundle(bundle, tiny(), "bf16", None) is bundle
    monkeypatch.setattr("flintc.api.gpu_target", lambda: "sm_100")
    with pytest.raises(
        BundleError, match=r"built for sm_90, not for sm_100 \(flintc compile tiny-flint .*--target sm_100"
    ):
        api._gpu_bundle(bundle, tiny(), "bf16", None)


def test_a_gpu_that_nothing_is_compiled_for(monkeypatch):
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Some GPU")
    with pytest.raises(BackendError, match="compiled for sm_90, sm_100; Some GPU here is sm_86"):
        flintc.load("anywhere", device="cuda")


@pytest.mark.parametrize("options", [{}, {"backend": "cuda"}, {"device": "cuda"}])
def test_a_gpu_without_the_package_that_launches_is_told_before_anything_is_read(gpu, monkeypatch, options):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendError, match=r"needs the package cuda-bindings \(pip install 'flintc\[cuda\]'\)"):
        flintc.load("anywhere", **options)


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"device": "cpu"}, {"numerics": "fp32"}])
def test_what_runs_without_that_package_does_not_ask_for_it(gpu, monkeypatch, options):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CheckpointError, match="anywhere"):
        flintc.load("anywhere", **options)


def test_the_pool_takes_what_is_left():
    layout = KvLayout.from_graph(api.lower("flint"))
    page = layout.page_bytes()
    assert page == 64 * 28 * 1024
    rings = 8 * layout.ring_bytes()
    assert pool_pages(layout, 262_144, 8, 200 << 30) == 8 * 4096
    assert pool_pages(layout, 262_144, 8, RESERVE + rings + 5000 * page) == 5000
    assert pool_pages(layout, 1000, 1, RESERVE + rings + 5000 * page) == 16
    with pytest.raises(CapacityError, match=r"262144 tokens needs 7.52 GB .* 0.18 GB .*load with context=6400 or less"):
        pool_pages(layout, 262_144, 8, RESERVE + rings + 100 * page)
    with pytest.raises(CapacityError, match="more memory"):
        pool_pages(layout, 262_144, 8, 0)


def test_a_model_without_full_layers_needs_no_pool():
    layout = KvLayout.from_graph(api.lower("flint"))
    windowed = KvLayout(layout.page, tuple(c for c in layout.caches if c.window), None, layout.rings)
    assert pool_pages(windowed, 640, 2, 0) == 20


def test_workspace_of_full_flint_is_small():
    """Logits, and split-KV partials of eight rows, are most of it: 66 of 32 heads of 128 FP32 channels each."""
    from flintc.codegen.planner import plan
    from flintc.codegen.sampler import with_sampler

    made = with_sampler(plan(api.lower("flint")))
    symbols = symbols_of(KvLayout.from_graph(made.graph), 262_144, 8, 262_144)
    large = 8 * 66 * 32 * 128 * 4 + 8 * 150_144 * 4
    assert large < workspace_bytes(made, {**symbols, "B": 8}) < 1.9 * large


def test_weights_that_do_not_fit(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (24 << 30, 24 << 30))
    with pytest.raises(CapacityError, match=r"weights take 79\.\d GB; 25\.8 GB"):
        check_fit(api.lower("flint"))
    check_fit(api.lower("flint", "nvfp4"))


def test_what_an_earlier_model_left_to_torch_is_free(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (4 << 30, 48 << 30))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 40 << 30)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 10 << 30)
    check_fit(api.lower("flint", "nvfp4"))
    with pytest.raises(CapacityError, match=r"36\.5 GB"):
        check_fit(api.lower("flint"))
