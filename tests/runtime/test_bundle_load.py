"""A compiled bundle under a checkpoint: the issue's own example, and bundles that belong to another model."""

import warnings

import pytest
import torch

import flintc
from flintc import api, building
from flintc.bundle import load_bundle
from flintc.errors import BundleError, FlintcWarning


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return flintc.compile("tiny-flint", out=tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "checkpoint"
    api.synth("tiny-flint", path)
    return path


def test_compile_then_generate_what_transformers_generates(bundle, folder):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 512, (1, 25), generator=torch.Generator().manual_seed(0))
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    model = flintc.load(folder, bundle=bundle.path, numerics="fp32")
    got = model.generate(ids[0].tolist(), max_tokens=40, temperature=0.0)
    assert got.token_ids == tuple(expected[0, 25:].tolist())


def test_a_bundle_from_memory_and_from_its_folder(bundle, folder):
    ids, options = list(range(40)), {"max_tokens": 10, "seed": 1}
    expected = flintc.load(folder, spec="tiny-flint").generate(ids, **options)
    assert flintc.load(folder, bundle=bundle).generate(ids, **options) == expected
    assert flintc.load(folder, bundle=str(bundle.path)).generate(ids, **options) == expected


def test_its_pages_and_chunks_are_used_with_the_architectures_spec_too(bundle, folder):
    model = flintc.load(folder, bundle=bundle, spec="flint", numerics="fp32")
    assert model.executor.kv.layout.page == 8
    assert flintc.load(folder, numerics="fp32").executor.kv.layout.page == 64


def test_what_a_bundle_was_built_from(bundle):
    manifest = load_bundle(bundle.path).manifest
    assert (manifest.spec, manifest.weights, manifest.batches) == ("tiny-flint", "bf16", (1, 2, 4, 8))
    assert manifest.pipeline[0] == "residual-norm"
    assert manifest.targets == ("sm_90",)


def test_disabled_passes_and_batches_are_recorded(tmp_path):
    made = flintc.compile("tiny-flint", batch=(4, 1, 4), disable_passes=["dependent-launch"], out=tmp_path / "b")
    assert "dependent-launch" not in made.manifest.pipeline
    assert made.manifest.batches == (1, 4)
    assert not any(kernel.waits for kernel in made.plan.kernels.values())


def test_without_a_folder_the_bundle_goes_to_the_cache(tmp_path, own_cache, bundle):
    made = flintc.compile("tiny-flint")
    assert made.path.parent == own_cache / "bundles"
    assert load_bundle(made.path).manifest == bundle.manifest
    again = flintc.compile("tiny-flint", out=tmp_path / "own", progress=lambda *_: pytest.fail("compiled again"))
    assert (again.path, again.files()) == (tmp_path / "own", made.files())


def test_without_a_folder_and_with_no_cache_to_write_there_is_nothing_to_return(tmp_path, own_cache):
    (own_cache / "bundles").write_text("in the way of the folder")
    with pytest.warns(FlintcWarning, match="used, but not kept"):
        assert flintc.compile("tiny-flint", out=tmp_path / "own").path == tmp_path / "own"
    with pytest.raises(BundleError, match="cannot write the bundle"):
        flintc.compile("tiny-flint")


@pytest.mark.parametrize(("compiler", "slow"), [("3.6.0", True), ("3.7.1", False), ("3.10.0+local", False)])
def test_a_compiler_of_slow_kernels_is_warned_of(own_cache, monkeypatch, compiler, slow):
    """Once, as it compiles: the bundle that the cache keeps has been warned of."""
    monkeypatch.setattr(building, "version", lambda name: compiler if name == "triton" else "1.0")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            flintc.compile("tiny-flint")
    words = [str(w.message) for w in told if issubclass(w.category, FlintcWarning)]
    assert len(words) == slow
    assert not slow or words[0].startswith("Triton 3.6.0 makes kernels that take about twice as long")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"layers": 5}, r"L5\.w\.\w+ is .* there, absent here"),
        ({"hidden": 64}, r"L0\.w\.dense_down is bf16\[128, 192\] there, bf16\[64, 192\] here"),
        ({"window": 12}, r"op L2\.attention is .*window=13 there, .*window=12 here"),
        ({"experts_per_token": 2}, r"op L2\.topk is .*k=3.* there, .*k=2.* here"),
    ],
)
def test_a_bundle_for_another_model_is_refused(bundle, tmp_path, sizes, words):
    api.synth("tiny-flint", tmp_path / "other", sizes=sizes)
    with pytest.raises(BundleError, match=f"is for another model than the checkpoint.*{words}"):
        flintc.load(tmp_path / "other", bundle=bundle)


def test_a_bundle_for_other_weights_is_refused(bundle, tmp_path):
    api.synth("tiny-flint", tmp_path / "a.gguf", format="gguf")
    with pytest.raises(BundleError, match="its weights are bf16, the checkpoint's nvfp4"):
        flintc.load(tmp_path / "a.gguf", bundle=bundle)
