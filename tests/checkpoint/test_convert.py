"""Conversion: the same numbers in another form, or BF16 quantised with its error on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from oracle.driver import Driver
from oracle.random_flints import logits, random_prompt
from random_gguf import Flint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.convert import convert
from flintc.checkpoint.convert_text import folder_text, gguf_text
from flintc.checkpoint.synth import synth_safetensors
from flintc.errors import CheckpointError, FlintcError, UsageError
from flintc.ir.build import build
from flintc.runtime.demo_tokenizer import CHAT_TEMPLATE, demo_metadata, demo_tokenizer, write_demo_tokenizer
from flintc.spec import bind_defaults, load_spec, spec_for

SEEDS = [0, 3, 4]
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def gguf_values(path: Path) -> dict[str, np.ndarray]:
    """Every weight of a GGUF file as gguf dequantises it, times its scale."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    values = {}
    for name, t in tensors.items():
        value = gguf.quants.dequantize(t.data, t.tensor_type) if t.tensor_type.name == "NVFP4" else np.array(t.data)
        scale = tensors.get(name.replace(".weight", ".scale"))
        if t.tensor_type.name == "NVFP4" and scale is not None:
            value = value * scale.data.reshape(-1, *[1] * (value.ndim - 1))
        if not name.endswith(".scale"):
            values[name] = value
    return values


def folder_values(folder: Path) -> dict[str, np.ndarray]:
    """Every weight of a ModelOpt folder, unpacked by a few lines of numpy."""
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    values = {}
    for name, t in stored.items():
        if t.dtype != torch.uint8:
            values[name] = t.float().numpy()
            continue
        codes, rows = t.numpy(), t.shape[:-1]
        nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*rows, -1)
        scales = stored[f"{name}_scale"].float().numpy().repeat(16, axis=-1)
        values[name] = E2M1[nibbles] * scales * stored[f"{name}_scale_2"].numpy()
    return {k: v for k, v in values.items() if not k.endswith(("_scale", "_scale_2"))}


@pytest.mark.parametrize("seed", SEEDS)
def test_gguf_to_modelopt_and_back_keeps_every_number(seed: int, tmp_path: Path) -> None:
    flint = Flint(seed)
    flint.write(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "folder", "safetensors", shard_bytes=200_000)
    convert(tmp_path / "folder", tmp_path / "b.gguf", "gguf")
    before, after = gguf_values(tmp_path / "a.gguf"), gguf_values(tmp_path / "b.gguf")
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    for t in gguf.GGUFReader(tmp_path / "b.gguf").tensors:
        if t.tensor_type.name == "NVFP4":  # canonical, where the original has 0x7F and sign bits
            assert t.data.reshape(-1, 36)[:, :4].max() <= 0x7E
    spec = spec_for(gguf="flint")
    models = [open_checkpoint(tmp_path / name).bind(spec) for name in ("a.gguf", "folder", "b.gguf")]
    for model in models[1:]:
        assert (model.dims, model.layer_sets) == (models[0].dims, models[0].layer_sets)
        assert model.numbers == pytest.approx(models[0].numbers, rel=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_modelopt_holds_published_names_and_gguf_s_numbers(seed: int, tmp_path: Path) -> None:
    flint = Flint(seed)
    flint.write(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "folder", "safetensors")
    theirs, ours = gguf_values(tmp_path / "a.gguf"), folder_values(tmp_path / "folder")
    c, n = flint.config, len(flint.config.mlp_only_layers)
    names = {
        "model.embed_tokens.weight": None,
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.self_attn.softmax_offset": "blk.0.attn_sinks.weight",
        f"model.layers.{n}.mlp.gate.weight": f"blk.{n}.ffn_gate_inp.weight",
        f"model.layers.{n}.mlp.shared_expert.up_proj.weight": f"blk.{n}.ffn_up_shexp.weight",
    }
    for ours_name, theirs_name in names.items():
        if theirs_name is not None:
            np.testing.assert_array_equal(ours[ours_name], theirs[theirs_name])
    for e in range(c.num_experts):
        for part in ("gate", "up", "down"):
            published = f"model.layers.{n}.mlp.experts.{e}.{part}_proj.weight"
            np.testing.assert_array_equal(ours[published], theirs[f"blk.{n}.ffn_{part}_exps.weight"][e])
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4" and config["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_modelopt_computes_what_transformers_does(seed: int, tmp_path: Path) -> None:
    flint = Flint(seed)
    flint.write(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "folder", "safetensors", shard_bytes=200_000)
    prompt = random_prompt(seed, flint.config.vocab_size, 40)
    driver = Driver(tmp_path / "folder", "fp32")
    torch.testing.assert_close(driver.feed(prompt), logits(flint.oracle(), prompt), atol=1e-4, rtol=0)
    stored = {k for f in (tmp_path / "folder").glob("*.safetensors") for k in safe_open(f, "pt").keys()}  # noqa: SIM118
    assert set(driver.report.used) == stored


def test_modelopt_to_gguf_and_back_keeps_every_byte(tmp_path: Path) -> None:
    Flint(3).write(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "one", "safetensors")
    convert(tmp_path / "one", tmp_path / "b.gguf", "gguf")
    convert(tmp_path / "b.gguf", tmp_path / "two", "safetensors")
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "model"
    synth_safetensors(bind_defaults(load_spec("specs/tiny-flint.yaml")), folder, extras=write_demo_tokenizer)
    return folder


def test_bf16_is_quantised_with_its_error_on_record(bf16: Path, tmp_path: Path) -> None:
    report = convert(bf16, tmp_path / "folder", "safetensors")
    before = {k: v.float().numpy() for k, v in load_file(bf16 / "model.safetensors").items()}
    after = folder_values(tmp_path / "folder")
    assert before.keys() == after.keys()
    packed = {n for n, t in load_file(tmp_path / "folder" / "model.safetensors").items() if t.dtype == torch.uint8}
    assert report.errors.keys() == packed and len(packed) > 100
    for name, value in before.items():
        error = after[name] - value
        if name not in packed:
            assert not error.any()
            continue
        relative = float(np.linalg.norm(error) / np.linalg.norm(value))
        assert 0.05 < relative < 0.11
        assert report.errors[name].relative == pytest.approx(relative, rel=1e-3)
        assert report.errors[name].largest == pytest.approx(float(np.abs(error).max()), rel=1e-3)


def test_both_forms_of_a_quantised_model_are_equal(bf16: Path, tmp_path: Path) -> None:
    convert(bf16, tmp_path / "x.gguf", "gguf")
    convert(bf16, tmp_path / "folder", "safetensors")
    loads = []
    for name in ("x.gguf", "folder"):
        checkpoint = open_checkpoint(tmp_path / name)
        match = checkpoint.spec_match
        model = checkpoint.bind(spec_for(match.architecture, match.gguf))
        loads.append(checkpoint.load(build(model, "nvfp4"), model))
    assert loads[0].keys() == loads[1].keys()
    for name, one in loads[0].items():
        for part in ("codes", "scales", "scale") if not isinstance(one, torch.Tensor) else ("data",):
            assert torch.equal(getattr(one, part), getattr(loads[1][name], part)), name


def test_parts_of_one_weight_share_their_scale(bf16: Path, tmp_path: Path) -> None:
    convert(bf16, tmp_path / "x.gguf", "gguf")
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    q, k, v = (tensors[f"blk.3.attn_{p}.scale"] for p in "qkv")
    assert q == k == v
    gate, up = (tensors[f"blk.3.ffn_{p}_exps.scale"] for p in ("gate", "up"))
    source = load_file(bf16 / "model.safetensors")
    names = [[f"model.layers.3.mlp.experts.{e}.{p}_proj.weight" for p in ("gate", "up")] for e in range(8)]
    largest = torch.stack([torch.cat([source[n] for n in pair]).float().abs().amax() for pair in names])
    np.testing.assert_array_equal(gate, (largest / (6 * 448)).numpy())
    np.testing.assert_array_equal(up, gate)


def test_text_travels_from_folder_to_gguf_and_back(bf16: Path, tmp_path: Path) -> None:
    report = convert(bf16, tmp_path / "x.gguf", "gguf")
    assert report.notes == []
    metadata: dict[str, Any] = dict(open_checkpoint(tmp_path / "x.gguf").metadata)
    expected = demo_metadata(512)
    assert {k: v for k, v in metadata.items() if k.startswith("tokenizer.")} == expected
    convert(tmp_path / "x.gguf", tmp_path / "folder", "safetensors")
    again = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    text = "Hello 123 漢字<|user|>"
    assert again.encode(text).ids == demo_tokenizer().encode(text).ids
    assert (tmp_path / "folder" / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    stops = json.loads((tmp_path / "folder" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == json.loads((bf16 / "generation_config.json").read_text())["eos_token_id"]


def test_what_templates_use_travels_to_gguf_and_back(tmp_path: Path) -> None:
    """A default template among others, and the token it begins with."""
    write_demo_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = {
        "bos_token": {"content": "<|system|>"},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    metadata, lost = gguf_text(tmp_path, 512)
    assert lost is None and metadata["tokenizer.chat_template"] == "{{ bos_token }}"
    assert metadata["tokenizer.ggml.bos_token_id"] == demo_tokenizer().token_to_id("<|system|>")
    files, lost = folder_text(metadata)
    assert lost is None and files["chat_template.jinja"] == "{{ bos_token }}"
    assert json.loads(files["tokenizer_config.json"])["bos_token"] == "<|system|>"


def test_a_tokenizer_that_gguf_cannot_say_is_noted(tmp_path: Path) -> None:
    tokenizer = demo_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    metadata, lost = gguf_text(tmp_path, 512)
    assert metadata == {} and lost is not None and "tokenizer.json: " in lost and "normalizer" in lost


def test_what_is_left_behind_is_noted(tmp_path: Path) -> None:
    Flint(3).write(tmp_path / "a.gguf")
    seen: list[tuple[int, int, str]] = []
    folder = tmp_path / "folder"
    report = convert(tmp_path / "a.gguf", folder, "safetensors", progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert any(note == "metadata without effect: general.name" for note in report.notes)
    assert any("tokenizer was not carried over: it has no tokenizer.ggml.tokens" in note for note in report.notes)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_failures_leave_nothing_behind(bf16: Path, tmp_path: Path, form: Any) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(bf16, tmp_path / "out", form, progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        convert(bf16, tmp_path / "out", form)
    assert (tmp_path / "out").read_text() == "precious"


def test_a_value_that_is_not_finite_is_refused(bf16: Path, tmp_path: Path) -> None:
    tensors = load_file(bf16 / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = torch.inf
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    (tmp_path / "bad" / "config.json").write_bytes((bf16 / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"w\.head: a value is not finite"):
        convert(tmp_path / "bad", tmp_path / "out.gguf", "gguf")
    assert not (tmp_path / "out.gguf").exists()


DAMAGE: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "block scale NaN": ("lm_head.weight_scale", torch.tensor([0x7F], dtype=torch.uint8), "negative or not a number"),
    "block scale negative": ("lm_head.weight_scale", torch.tensor([0xB8], dtype=torch.uint8), "negative or not"),
    "tensor scale NaN": ("lm_head.weight_scale_2", torch.tensor(torch.nan), "no scale"),
    "tensor scale negative": ("lm_head.weight_scale_2", torch.tensor(-1.0), "no scale"),
    "tensor scale of two": ("lm_head.weight_scale_2", torch.ones(2), r"expected F32\[\]"),
    "tensor scale missing": ("lm_head.weight_scale_2", None, "missing tensor lm_head.weight_scale_2"),
    "block scales missing": ("lm_head.weight_scale", None, "unknown tensor lm_head.weight_scale_2"),
    "scale of nothing": ("lm_head.other_scale", torch.ones(1), "unknown tensor lm_head.other_scale"),
    "input scale": ("lm_head.input_scale", torch.ones(1), "input_scale is not supported"),
    "codes of another type": ("lm_head.weight", torch.zeros(90, 32), "expected U8"),
    "rows": ("lm_head.weight", torch.zeros(89, 32, dtype=torch.uint8), r"expected F8_E4M3\[89, 4\]"),
    "unpacked": ("model.layers.0.self_attn.o_proj.weight", torch.zeros(64, 64), "expected U8"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_modelopt_folders_are_refused(case: str, tmp_path: Path) -> None:
    name, value, message = DAMAGE[case]
    Flint(3).write(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "folder", "safetensors")
    file = tmp_path / "folder" / "model.safetensors"
    tensors = load_file(file)
    if value is None:
        del tensors[name]
    elif value.dtype == torch.uint8 and name.endswith("_scale"):
        tensors[name].view(torch.uint8)[0, 0] = value[0]
    else:
        tensors[name] = value
    save_file(tensors, file)
    with pytest.raises(FlintcError, match=message):
        Driver(tmp_path / "folder", "fp32")
