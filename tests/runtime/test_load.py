"""`flintc.load` on checkpoints that transformers saved, against transformers itself."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import flintc
from flintc.errors import (
    BackendError,
    BundleError,
    CapacityError,
    CheckpointError,
    FlintcWarning,
    TokenizerError,
    UsageError,
)
from flintc.runtime.demo_tokenizer import write_demo_tokenizer
from flintc.spec import shipped_specs

#: As many ids as the demo tokenizer has, so that none is masked.
CONFIG = {
    "vocab_size": 269, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "max_position_embeddings": 128,
    "mlp_only_layers": [0], "eos_token_id": [256, 257], "initializer_range": 0.3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def theirs():
    from transformers import FlintConfig, FlintForCausalLM

    torch.manual_seed(0)
    model = FlintForCausalLM(FlintConfig(**CONFIG)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0, 2)
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(path)
    write_demo_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def oracle(folder):
    return flintc.load(folder, numerics="fp32")


def greedy(theirs, prompt, count, stops=None):
    """Tokens that transformers makes; the mask is given, since it would take a pad id in the prompt for padding."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("length", [1, 8, 9, 10, 40])
def test_same_greedy_tokens_as_transformers(theirs, oracle, length):
    got = oracle.generate(IDS[:length], max_tokens=30, temperature=0.0, stop_ids=())
    assert got.token_ids == greedy(theirs, IDS[:length], 30)


def test_same_logits_as_transformers(theirs, oracle):
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    assert torch.allclose(oracle.forward(IDS), expected, atol=1e-4, rtol=0)


def test_generation_stops_where_transformers_does(theirs, folder, tmp_path):
    stop = greedy(theirs, IDS, 20)[7]
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [268, stop], "do_sample": False}))
    got = flintc.load(copy, numerics="fp32").generate(IDS, max_tokens=20)
    assert got.token_ids == greedy(theirs, IDS, 20, [268, stop])
    assert got.finish_reason == "stop"


def test_default_is_rounded_reference_with_the_checkpoints_tokenizer(folder):
    model = flintc.load(folder)
    result = model.generate("hello", max_tokens=6, seed=1)
    assert result.path == "reference"
    assert result.prompt_tokens == 5
    assert isinstance(result.text, str)
    assert model.context == 128
    assert model.defaults.stop_ids == {256, 258, 260}
    assert model.chat([{"role": "user", "content": "hi"}], max_tokens=3).prompt_tokens == 7


def test_rounded_and_fp32_agree_up_to_rounding(folder, oracle):
    rounded, exact = flintc.load(folder).forward(IDS), oracle.forward(IDS)
    kl = torch.nn.functional.kl_div(rounded.log_softmax(1), exact.log_softmax(1), log_target=True, reduction="none")
    assert not torch.equal(rounded, exact)
    assert kl.sum(1).mean() < 0.1


def test_a_larger_context_is_done_with_a_warning(folder):
    with pytest.warns(FlintcWarning, match="context 300 exceeds the 128"):
        model = flintc.load(folder, context=300)
    assert len(model.generate(list(range(150)), max_tokens=100, temperature=0.0, stop_ids=()).token_ids) == 100


def test_a_smaller_context(folder):
    model = flintc.load(folder, context=50)
    with pytest.raises(CapacityError, match="limit of 50"):
        model.generate(IDS, max_tokens=11)
    model.generate(IDS, max_tokens=10)


def test_tokenizer_of_another_folder(folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    model = flintc.load(bare)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        model.generate("text")
    assert model.generate(IDS, max_tokens=2).text is None
    assert flintc.load(bare, tokenizer=folder).generate("text", max_tokens=2).text is not None
    with pytest.raises(TokenizerError, match="no such file"):
        flintc.load(bare, tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backend": "tpu"}, UsageError, "unknown backend 'tpu'"),
        ({"device": "mps"}, UsageError, "device is 'mps'"),
        ({"device": "cuda", "backend": "reference"}, UsageError, "reference backend does not run on 'cuda'"),
        ({"device": "cpu", "backend": "cuda"}, UsageError, "cuda backend does not run on 'cpu'"),
        ({"device": "cuda", "numerics": "fp32"}, UsageError, "rounding points"),
        ({"numerics": "fp16"}, UsageError, "choose rounded or fp32"),
        ({"backend": "interpret", "numerics": "fp32"}, UsageError, "rounding points"),
        ({"context": 0}, UsageError, "must be 1 or more"),
        ({"bundle": "/nowhere"}, BundleError, "/nowhere"),
        ({"spec": "flnt"}, UsageError, "flint"),
    ],
)
def test_impossible_loads(folder, options, error, words):
    with pytest.raises(error, match=words):
        flintc.load(folder, **options)


@pytest.mark.parametrize("options", [{"backend": "cuda"}, {"device": "cuda"}])
def test_cuda_without_a_gpu(folder, options):
    with pytest.raises(BackendError, match="no NVIDIA GPU here"):
        flintc.load(folder, **options)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nowhere"])
def test_a_path_that_is_not_there(path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        flintc.load(path)


def hub_cache(folder, root, commit="1" * 40):
    """The layout in which huggingface_hub keeps a downloaded repository."""
    repository = root / "models--some--flint"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return commit


def test_hub_ids_come_from_the_cache_when_offline(folder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = hub_cache(folder, tmp_path)
    expected = flintc.load(folder).generate(IDS, max_tokens=5, temperature=0.0)
    for name in ("some/flint", "some/flint@main", f"some/flint@{commit}"):
        assert flintc.load(name).generate(IDS, max_tokens=5, temperature=0.0) == expected
    for name in ("some/flint@other", "some/other"):
        with pytest.raises(CheckpointError, match=r"some/\w+: no such file or folder, and the hub"):
            flintc.load(name)


def test_import_and_version_stay_fast():
    code = "import sys, flintc; flintc.__version__; print(*(m for m in ('torch', 'triton') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_shipped_specs_hash_differently():
    from flintc.spec import load_spec

    hashes = {load_spec(name).sha256 for name in shipped_specs()}
    assert len(hashes) == len(shipped_specs())
    assert load_spec("flint").sha256 in hashes
