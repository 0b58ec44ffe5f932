"""GGUF checkpoints: what is read, what is reported, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from random_gguf import Flint

from flintc.checkpoint import Checkpoint, open_checkpoint
from flintc.errors import FlintcError
from flintc.ir.build import build
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import spec_for

F32, F16, BF16 = (gguf.GGMLQuantizationType[k] for k in ("F32", "F16", "BF16"))
SEED = 3  # two dense layers and one of experts


def opened(flint: Flint, folder: Path, config: Path | None = None) -> Checkpoint:
    flint.write(folder / "flint.gguf")
    return open_checkpoint(folder / "flint.gguf", config)


def loaded(checkpoint: Checkpoint, weights: str | None = None) -> dict[str, torch.Tensor | Nvfp4]:
    match = checkpoint.spec_match
    model = checkpoint.bind(spec_for(match.architecture, match.gguf))
    return checkpoint.load(build(model, weights or checkpoint.weights_format), model)


def scales_of(flint: Flint, *names: str) -> np.ndarray:
    return np.concatenate([flint.tensors[f"{name}.scale"][0] for name in names])


def moe_layer(flint: Flint) -> int:
    return len(flint.config.mlp_only_layers)


def test_scales_are_kept_exactly(tmp_path: Path) -> None:
    flint = Flint(SEED)
    weights = loaded(opened(flint, tmp_path))
    n, c = moe_layer(flint), flint.config
    qkv, head = weights["L0.w.qkv"], weights["w.head"]
    assert isinstance(qkv, Nvfp4) and isinstance(head, Nvfp4)
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = np.repeat(scales_of(flint, "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"), [q, kv, kv])
    np.testing.assert_array_equal(qkv.scale.numpy(), rows)
    np.testing.assert_array_equal(head.scale.numpy(), scales_of(flint, "output"))
    gate_up, down = weights[f"L{n}.w.expert_gate_up"], weights[f"L{n}.w.expert_down"]
    assert isinstance(gate_up, Nvfp4) and isinstance(down, Nvfp4)
    np.testing.assert_array_equal(down.scale.numpy(), scales_of(flint, f"blk.{n}.ffn_down_exps"))
    expected = np.stack([scales_of(flint, f"blk.{n}.ffn_{p}_exps") for p in ("gate", "up")], axis=1)
    np.testing.assert_array_equal(gate_up.scale.numpy(), np.repeat(expected, c.moe_intermediate_size, axis=1))


def test_scales_that_agree_stay_one_per_tensor_or_expert(tmp_path: Path) -> None:
    flint = Flint(SEED, same_scales=True)
    weights = loaded(opened(flint, tmp_path))
    n = moe_layer(flint)
    qkv, gate_up = weights["L0.w.qkv"], weights[f"L{n}.w.expert_gate_up"]
    assert isinstance(qkv, Nvfp4) and isinstance(gate_up, Nvfp4)
    np.testing.assert_array_equal(qkv.scale.numpy(), scales_of(flint, "blk.0.attn_q"))
    np.testing.assert_array_equal(gate_up.scale.numpy(), scales_of(flint, f"blk.{n}.ffn_gate_exps"))


def test_absent_scales_are_one_and_one_scale_serves_all_experts(tmp_path: Path) -> None:
    flint = Flint(SEED)
    n = moe_layer(flint)
    del flint.tensors["output.scale"]
    del flint.tensors[f"blk.{n}.ffn_up_exps.scale"]
    flint.tensors[f"blk.{n}.ffn_gate_exps.scale"] = (np.float32([1.0]), F32)
    flint.tensors[f"blk.{n}.ffn_down_exps.scale"] = (np.float32([0.25]), F32)
    checkpoint = opened(flint, tmp_path)
    weights = loaded(checkpoint)
    for name, scale in (("w.head", 1.0), (f"L{n}.w.expert_gate_up", 1.0), (f"L{n}.w.expert_down", 0.25)):
        weight = weights[name]
        assert isinstance(weight, Nvfp4) and weight.scale.unique().tolist() == [scale]
    assert any("2 tensors have no .scale, read as 1.0" in note for note in checkpoint.report.notes)


def test_the_report_lists_every_tensor_and_the_metadata_without_effect(tmp_path: Path) -> None:
    flint = Flint(SEED)
    flint.metadata |= {"flint.new_feature": 3, "general.license": "mit", "tokenizer.ggml.scores": [0.5]}
    checkpoint = opened(flint, tmp_path)
    seen: list[tuple[int, int, str]] = []
    model = checkpoint.bind(spec_for(gguf="flint"))
    weights = checkpoint.load(build(model, "nvfp4"), model, progress=lambda *step: seen.append(step))
    assert sorted(checkpoint.report.used) == sorted(flint.tensors)
    ignored = next(note for note in checkpoint.report.notes if note.startswith("metadata without effect"))
    assert ignored.split(": ")[1].split(", ") == [
        "flint.new_feature",
        "general.license",
        "general.name",
        "tokenizer.ggml.scores",
    ]
    assert [step[2] for step in seen] == list(weights) and {step[1] for step in seen} == {len(weights)}
    assert checkpoint.report.nbytes == sum(data.nbytes for data, _ in flint.tensors.values())
    assert str(checkpoint.report).endswith("GB/s") and checkpoint.report.seconds > 0


def test_vocabulary_size_is_that_of_the_embedding(tmp_path: Path) -> None:
    flint = Flint(SEED)
    checkpoint = opened(flint, tmp_path)
    assert checkpoint.bind(spec_for(gguf="flint")).dims["vocab"] == flint.config.vocab_size


def test_norms_and_routers_may_be_bf16(tmp_path: Path) -> None:
    flint = Flint(SEED, bf16_router=True)
    half = torch.from_numpy(flint.tensors["output_norm.weight"][0]).to(torch.bfloat16)
    flint.tensors["output_norm.weight"] = (half.view(torch.uint8).numpy(), BF16)
    weights = loaded(opened(flint, tmp_path))
    norm = weights["w.final_norm"]
    assert isinstance(norm, torch.Tensor) and norm.dtype == torch.float32 and torch.equal(norm, half.float())


def test_a_bf16_file_is_a_bf16_checkpoint(tmp_path: Path) -> None:
    flint = Flint(SEED, drop_scales=True)
    for name, (data, kind) in flint.tensors.items():
        if kind == gguf.GGMLQuantizationType.NVFP4:
            values = torch.from_numpy(gguf.quants.dequantize(data, kind)).to(torch.bfloat16)
            flint.tensors[name] = (values.view(torch.uint8).numpy(), BF16)
    checkpoint = opened(flint, tmp_path)
    assert checkpoint.weights_format == "bf16"
    head = loaded(checkpoint)["w.head"]
    assert isinstance(head, torch.Tensor) and head.dtype == torch.bfloat16
    torch.testing.assert_close(head.float(), flint.state["lm_head.weight"], rtol=0, atol=0)


def test_config_beside_the_file_must_agree(tmp_path: Path) -> None:
    flint = Flint(SEED)
    folder = tmp_path / "config"
    flint.config.architectures = ["FlintForCausalLM"]
    flint.config.save_pretrained(folder)
    spec = spec_for(gguf="flint")
    assert opened(flint, tmp_path, folder).bind(spec).dims == opened(flint, tmp_path).bind(spec).dims
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("sliding_window", 99), ("rms_norm_eps", 1e-5), ("mlp_only_layers", [])):
        other = tmp_path / f"{key}.json"
        other.write_text(json.dumps(config | {key: value}))
        with pytest.raises(FlintcError, match=rf"{key}\.json: .* in .*flint\.gguf it is"):
            opened(flint, tmp_path, other).bind(spec)


Change = Callable[[Flint], None]


def tensor(name: str, data: np.ndarray | None, kind: gguf.GGMLQuantizationType = F32) -> Change:
    """Set, or with None remove, one tensor."""

    def change(flint: Flint) -> None:
        flint.tensors.pop(name, None)
        if data is not None:
            flint.tensors[name] = (data, kind)

    return change


def key(name: str, value: object) -> Change:
    return lambda flint: flint.metadata.update({name: value})


def nan_block(flint: Flint) -> None:
    flint.tensors["blk.0.attn_k.weight"][0][3, 1] = 0xFF


def fewer_rows(flint: Flint) -> None:
    data, kind = flint.tensors["blk.0.attn_k.weight"]
    flint.tensors["blk.0.attn_k.weight"] = (data[:-1].copy(), kind)


def wide_projection(flint: Flint) -> None:
    del flint.tensors["blk.0.attn_output.scale"]
    flint.tensors["blk.0.attn_output.weight"] = (np.ones((64, 64), np.float32), F32)


REFUSED: dict[str, tuple[Change, str]] = {
    "scale NaN": (tensor("blk.0.attn_q.scale", np.float32([np.nan])), r"blk.0.attn_q.scale\[0\] is nan"),
    "scale infinite": (tensor("output.scale", np.float32([np.inf])), r"output.scale\[0\] is inf"),
    "scale negative": (tensor("output.scale", np.float32([-0.5])), r"output.scale\[0\] is -0.5"),
    "scale of two": (tensor("output.scale", np.float32([1, 1])), r"output.scale is F32\[2\], expected F32\[1\]"),
    "scale F16": (tensor("output.scale", np.float16([1]), F16), r"output.scale is F16\[1\]"),
    "scale without weight": (tensor("blk.0.attn_x.scale", np.float32([1])), "unknown tensor blk.0.attn_x.scale"),
    "scale of a norm": (tensor("output_norm.scale", np.float32([1])), "unknown tensor output_norm.scale"),
    "block scale 0xFF": (nan_block, "blk.0.attn_k.weight: a block scale is 0xFF"),
    "input scale": (tensor("blk.0.attn_q.input_scale", np.float32([1])), "attn_q.input_scale is not supported"),
    "expert bias": (tensor("blk.2.exp_probs_b.bias", np.float32([1])), "exp_probs_b.bias is not supported"),
    "FP4 activations": (key("general.tensor_extra.prec_a4", [False, True]), "prec_a4 is set"),
    "architecture": (key("general.architecture", "llama"), "llama"),
    "missing": (tensor("blk.0.attn_sinks.weight", None), "missing tensor blk.0.attn_sinks.weight"),
    "missing norm": (tensor("output_norm.weight", None), "missing tensor output_norm.weight"),
    "unknown": (tensor("blk.0.extra.weight", np.float32([1])), "unknown tensor blk.0.extra.weight"),
    "layer too many": (tensor("blk.99.attn_norm.weight", np.float32([1])), "unknown tensor blk.99.attn_norm"),
    "rows": (fewer_rows, r"blk.0.attn_k.weight is \[63, 64\], expected \[64, 64\]"),
    "norm size": (tensor("output_norm.weight", np.ones(3, np.float32)), r"output_norm.weight is \[3\], expected"),
    "linear F32": (wide_projection, "attn_output.weight is F32, expected NVFP4"),
    "norm F16": (tensor("output_norm.weight", np.ones(64, np.float16), F16), "is F16, expected BF16 or F32"),
    "pattern too short": (key("flint.attention.sliding_window_pattern", [True]), "1 entries for"),
    "rope contradicts": (key("flint.rope_pattern", [True, False, True]), "contradict"),
    "layers": (key("flint.block_count", 7), "expected|entries for 7 layers"),
    "gating": (key("flint.expert_gating_func", 1), "expert_gating_func is 1"),
    "vocabulary": (key("flint.vocab_size", 12), "expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    flint = Flint(SEED)
    change(flint)
    with pytest.raises(FlintcError, match=message) as caught:
        loaded(opened(flint, tmp_path))
    assert str(tmp_path / "flint.gguf") in str(caught.value) or case == "architecture"


def test_all_false_flags_for_fp4_activations_are_no_reason_to_refuse(tmp_path: Path) -> None:
    flint = Flint(SEED)
    flint.metadata["general.tensor_extra.prec_a4"] = [False, False]
    assert loaded(opened(flint, tmp_path))


def test_a_model_compiled_for_bf16_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FlintcError, match=r"is NVFP4, expected BF16 or F32 \(compile for nvfp4"):
        loaded(opened(Flint(SEED), tmp_path), "bf16")
