"""`flintc.load(..., prepared=...)`: off by default, the same model, and what a loaded model says of it."""

from pathlib import Path

import pytest

import flintc
from flintc.errors import UsageError

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
GGUF = EXAMPLE / "tiny-flint.gguf"
PROMPT = "import os\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("path", [EXAMPLE, GGUF])
@pytest.mark.parametrize("where", [True, "folder"])
def test_a_prepared_copy_gives_the_same_text(path, where, cache, tmp_path):
    prepared = where if where is True else tmp_path / where
    plain = flintc.load(path)
    assert not cache.exists() and plain.loaded.source == "checkpoint"
    models = [flintc.load(path, prepared=prepared) for _ in range(2)]
    assert [model.loaded.source for model in models] == ["checkpoint", "prepared"]
    assert [p.name for p in tmp_path.iterdir()] == ["cache" if where is True else where]
    root = cache / "prepared" if where is True else prepared
    assert len(list(root.glob("*/weights.safetensors"))) == 1
    made = {model.generate(PROMPT, max_tokens=12, seed=2).token_ids for model in (plain, *models)}
    assert len(made) == 1


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_one_copy_serves_every_backend(backend, tmp_path):
    flintc.load(GGUF, prepared=tmp_path)
    model = flintc.load(GGUF, prepared=tmp_path, backend=backend)
    assert model.loaded.source == "prepared"
    assert len(list(tmp_path.glob("*/weights.safetensors"))) == 1


def test_a_model_tells_what_loading_took():
    model = flintc.load(GGUF)
    assert model.loaded.nbytes <= GGUF.stat().st_size < 1.2 * model.loaded.nbytes
    assert model.loaded.rate == pytest.approx(model.loaded.nbytes / 1e9 / model.loaded.seconds)
    assert 0.9 * model.loaded.nbytes < model.loaded.weight_bytes < model.loaded.nbytes
    assert model.loaded.device_peak is None
    assert model.notes[0] == str(model.loaded) and model.notes[0].endswith(" GB/s")


def test_a_home_of_nobody_is_named():
    with pytest.raises(UsageError, match="prepared is ~no-such-user/x: there is no such user"):
        flintc.load(GGUF, prepared="~no-such-user/x")


def test_no_copy_for_fp32(cache):
    with pytest.raises(UsageError, match="prepared copies are rounded"):
        flintc.load(GGUF, prepared=True, numerics="fp32")
    assert not cache.exists()
