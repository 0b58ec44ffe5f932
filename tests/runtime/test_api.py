"""The facade on synthetic checkpoints: other specs, other formats, other sizes."""

from pathlib import Path

import pytest
import torch

import flintc
from flintc import api
from flintc.errors import PassError, SpecError, UsageError

OTHER = Path(__file__).parents[1] / "data" / "other.yaml"
IDS = list(range(5, 60))


def test_a_spec_that_shares_nothing_with_flint(tmp_path):
    api.synth(OTHER, tmp_path / "other")
    exact = flintc.load(tmp_path / "other", spec=OTHER, numerics="fp32")
    got = exact.generate(IDS, max_tokens=15, temperature=0.0).token_ids
    ids = list(IDS)
    for token in got:
        assert token == exact.forward(ids)[-1].argmax().item()
        ids.append(token)
    rounded = flintc.load(tmp_path / "other", spec=OTHER)
    assert rounded.generate(IDS, max_tokens=15, seed=1).path == "reference"
    with pytest.raises(flintc.FlintcError, match="OtherForCausalLM"):
        flintc.load(tmp_path / "other")


def test_a_gguf_file_brings_its_own_tokenizer(tmp_path):
    api.synth("tiny-flint", tmp_path / "a.gguf", format="gguf", demo_tokenizer=True)
    model = flintc.load(tmp_path / "a.gguf")
    assert model.generate("hello", max_tokens=4).prompt_tokens == 5
    assert model.chat([{"role": "user", "content": "hi"}], max_tokens=4).prompt_tokens == 7
    assert model.defaults.stop_ids == {256, 258, 260}
    assert model.sampled_vocab == 269


def test_a_gguf_file_without_a_tokenizer_takes_that_of_its_config(tmp_path):
    api.synth("tiny-flint", tmp_path / "a.gguf", format="gguf")
    api.synth("tiny-flint", tmp_path / "folder", demo_tokenizer=True)
    assert flintc.load(tmp_path / "a.gguf").sampled_vocab is None
    model = flintc.load(tmp_path / "a.gguf", config=tmp_path / "folder")
    assert model.sampled_vocab == 269
    assert model.defaults.stop_ids == {256, 258, 260}


def test_synthetic_checkpoints_of_other_sizes(tmp_path):
    api.synth("tiny-flint", tmp_path / "small", sizes={"layers": 3, "experts": 16, "vocab": 100})
    assert flintc.load(tmp_path / "small").forward(IDS).shape == (len(IDS), 100)
    for sizes, error, words in (
        ({"layrs": 3}, UsageError, "no size 'layrs' to set .*layers"),
        ({"q_width": 3}, UsageError, "no size 'q_width'"),
        ({"heads": 0}, SpecError, "positive"),
    ):
        with pytest.raises(error, match=words):
            api.synth("tiny-flint", tmp_path / "wrong", sizes=sizes)
    assert not (tmp_path / "wrong").exists()


def test_equal_seeds_give_equal_models(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        api.synth("tiny-flint", tmp_path / name, seed=seed)
    a, b, c = (flintc.load(tmp_path / name).forward(IDS[:5]) for name in "abc")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_model_of_a_checkpoints_sizes():
    example = Path(__file__).parents[2] / "examples" / "tiny-flint"
    model, weights = api.model_of("flint", checkpoint=example / "tiny-flint.gguf")
    assert (model.dims["hidden"], model.dims["window"], weights) == (192, 65, "nvfp4")
    assert api.model_of("flint", "bf16", example / "tiny-flint.gguf")[1] == "bf16"
    assert api.model_of(model, "bf16") == (model, "bf16")
    assert api.model_of("flint")[0].dims["hidden"] == 2048


def test_lowered_graphs():
    baseline = api.lower("tiny-flint", stop_after="baseline")
    assert {len(launch.ops) for launch in baseline.launches} == {1}
    joined = api.lower("tiny-flint", stop_after="dependent-launch")
    assert [len(joined.layer_launches(layer)) for layer in joined.layers()] == [7] * 6
    cut = api.lower("tiny-flint")
    assert [len(cut.layer_launches(layer)) for layer in cut.layers()] == [9, 9, 10, 10, 10, 10]
    assert cut.ops == joined.ops == baseline.ops


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"weights": "int4"}, UsageError, "unknown weight format 'int4'"),
        ({"disable_passes": ("residual-nrm",)}, PassError, "residual-norm"),
        ({"batch": (1, 16)}, UsageError, "between 1 and 8"),
        ({"batch": ()}, UsageError, "between 1 and 8"),
        ({"target": "sm_80"}, UsageError, "unknown target 'sm_80'"),
        ({"target": ()}, UsageError, "no target"),
    ],
)
def test_impossible_compilations(options, error, words):
    with pytest.raises(error, match=words):
        flintc.compile("tiny-flint", **options)
