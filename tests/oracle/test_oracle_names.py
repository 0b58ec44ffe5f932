"""Checkpoints in each form of names, between flintc and transformers; the published configuration of full Flint."""

from __future__ import annotations

from pathlib import Path

import torch
from random_flints import greedy, load, logits, random_model, random_prompt
from safetensors.torch import save_file
from transformers import FlintConfig, FlintForCausalLM

import flintc
from flintc.checkpoint.config_json import published_config
from flintc.checkpoint.synth import synth_safetensors
from flintc.spec import bind_defaults, load_spec


def test_names_of_transformers_in_memory(tmp_path: Path) -> None:
    """The state dict as it is: `sinks`, and all experts of a layer in one tensor."""
    model = random_model(2)
    model.config.architectures = ["FlintForCausalLM"]
    model.config.save_pretrained(tmp_path)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.self_attn.sinks" in state and "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    prompt = random_prompt(2, model.config.vocab_size, 30)
    got = flintc.load(tmp_path, numerics="fp32").forward(prompt)
    torch.testing.assert_close(got, logits(model, prompt), atol=1e-4, rtol=0)


def test_transformers_reads_a_synthetic_checkpoint(tmp_path: Path) -> None:
    """Nothing missing or unexpected, the same tokens in FP32, and next tokens neither evenly likely nor certain."""
    path = tmp_path / "tiny"
    synth_safetensors(bind_defaults(load_spec("tiny-flint")), path, seed=5, shard_bytes=400_000)
    _, info = FlintForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model = load(path, torch.float32)
    prompt = random_prompt(5, 512, 60)
    expected = logits(model, prompt)
    ours = flintc.load(path, numerics="fp32", spec="tiny-flint")
    torch.testing.assert_close(ours.forward(prompt), expected, atol=1e-4, rtol=0)
    assert list(ours.generate(prompt, max_tokens=16, temperature=0.0).token_ids) == greedy(model, prompt, 16)
    entropy = torch.distributions.Categorical(logits=expected).entropy().mean()
    assert 1 < entropy < 4 and expected.softmax(-1).amax(-1).mean() > 0.1


def test_published_config_is_what_transformers_defaults_to() -> None:
    """Every key of full Flint's config.json that transformers knows has the value it has there by default."""
    ours, theirs = published_config(bind_defaults(load_spec("flint"))), FlintConfig().to_dict()
    shared = ours.keys() & theirs.keys() - {"architectures", "dtype", "rope_parameters"}
    assert len(shared) >= 20
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert ours["rope_parameters"]["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
    assert ours.keys() - theirs.keys() == {"no_rope_layer_indices", "router_score_function", "use_sliding_window"}
