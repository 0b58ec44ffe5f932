"""Safetensors in: forms, types and shapes of weights, against the same files read by package safetensors alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.synth import synth_safetensors
from flintc.errors import CheckpointError
from flintc.ir.build import build
from flintc.ir.graph import Graph
from flintc.spec import BoundModel, bind_defaults, load_spec

LAYER = "model.layers.2."  # a sliding MoE layer of tiny-flint
EXPERTS = f"{LAYER}mlp.experts."


@pytest.fixture(scope="module")
def tiny() -> BoundModel:
    return bind_defaults(load_spec("tiny-flint"))


@pytest.fixture(scope="module")
def graph(tiny: BoundModel) -> Graph:
    return build(tiny)


@pytest.fixture(scope="module")
def published(tiny: BoundModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("published") / "tiny"
    synth_safetensors(tiny, path, seed=1)
    return path


@pytest.fixture
def stored(published: Path) -> dict[str, Tensor]:
    return load_file(published / "model.safetensors")


@pytest.fixture
def load(tmp_path: Path, published: Path, graph: Graph, tiny: BoundModel) -> Callable[..., dict[str, Tensor]]:
    """Save a dict of tensors as a checkpoint, and load it."""

    def save_and_load(tensors: dict[str, Tensor], **options: bool) -> dict[str, Tensor]:
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((published / "config.json").read_text())
        return open_checkpoint(tmp_path).load(graph, tiny, **options)

    return save_and_load


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def fused(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint under the names transformers holds it by: `sinks`, and experts in one tensor."""
    result = {k.replace("softmax_offset", "sinks"): v for k, v in stored.items() if ".experts." not in k}
    for layer in range(2, 6):
        prefix = f"model.layers.{layer}.mlp.experts."
        part = {p: [stored[f"{prefix}{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")}
        result[f"{prefix}gate_up_proj"] = torch.cat((torch.stack(part["gate"]), torch.stack(part["up"])), dim=1)
        result[f"{prefix}down_proj"] = torch.stack(part["down"])
    return result


def test_every_weight_has_the_graphs_shape_and_type(published: Path, graph: Graph, tiny: BoundModel) -> None:
    checkpoint = open_checkpoint(published)
    seen: list[tuple[int, int, str]] = []
    weights = checkpoint.load(graph, tiny, progress=lambda *at: seen.append(at))
    wanted = {v.name: v.type for v in graph.values.values() if v.kind == "weight"}
    assert weights.keys() == wanted.keys()
    for name, type in wanted.items():
        assert weights[name].shape == type.shape
        assert weights[name].dtype == {"bf16": torch.bfloat16, "f32": torch.float32}[type.dtype]
    assert [done for done, _, _ in seen] == list(range(1, len(wanted) + 1))
    assert {total for _, total, _ in seen} == {len(wanted)}
    assert sorted(checkpoint.report.used) == sorted(load_file(published / "model.safetensors"))
    assert checkpoint.report.notes == []
    assert checkpoint.weights_format == "bf16" and checkpoint.spec_match.architecture == "FlintForCausalLM"


def test_values_are_stacked_and_concatenated(stored: dict[str, Tensor], load: Callable) -> None:
    weights = load(stored)
    qkv = torch.cat([stored[f"{LAYER}self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(weights["L2.w.qkv"], qkv)
    for expert in range(8):
        gate, up = (stored[f"{EXPERTS}{expert}.{p}_proj.weight"] for p in ("gate", "up"))
        assert torch.equal(weights["L2.w.expert_gate_up"][expert], torch.cat((gate, up)))
        assert torch.equal(weights["L2.w.expert_down"][expert], stored[f"{EXPERTS}{expert}.down_proj.weight"])
    assert torch.equal(weights["L2.w.sinks"], stored[f"{LAYER}self_attn.softmax_offset"])
    assert torch.equal(weights["w.head"], stored["lm_head.weight"])


def test_shards_hold_the_same(
    tiny: BoundModel, graph: Graph, stored: dict[str, Tensor], load: Callable, tmp_path: Path
) -> None:
    files = synth_safetensors(tiny, tmp_path / "sharded", seed=1, shard_bytes=300_000)
    assert len(files) > 4
    assert equal(open_checkpoint(tmp_path / "sharded").load(graph, tiny), load(stored))


def test_names_of_transformers(stored: dict[str, Tensor], load: Callable) -> None:
    assert equal(load(stored), load(fused(stored)))


def test_vectors_and_router_in_either_type(stored: dict[str, Tensor], load: Callable) -> None:
    """Norms, sinks and router may be BF16 or FP32; both are widened exactly."""
    narrow = {k: v.bfloat16() for k, v in stored.items()}
    wide = {k: v.float() if v.ndim == 1 or k.endswith("mlp.gate.weight") else v for k, v in narrow.items()}
    assert equal(load(narrow), load(wide))


def test_fp32_weights_are_rounded_and_reported(
    stored: dict[str, Tensor], load: Callable, tmp_path: Path, graph: Graph, tiny: BoundModel
) -> None:
    name = f"{LAYER}self_attn.o_proj.weight"
    stored[name] = stored[name].float() * (1 + 2.0**-12)
    assert torch.equal(load(stored)["L2.w.o"], stored[name].bfloat16())
    checkpoint = open_checkpoint(tmp_path)
    kept = checkpoint.load(graph, tiny, keep_fp32=True)
    assert torch.equal(kept["L2.w.o"], stored[name]) and checkpoint.report.notes == []
    assert kept["L3.w.o"].dtype == torch.bfloat16
    checkpoint.load(graph, tiny)
    (note,) = checkpoint.report.notes
    assert name in note and "1 FP32" in note


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.update({name: torch.zeros(shape, dtype=dtype)})


def swap_q_and_k(stored: dict[str, Tensor]) -> None:
    q, k = (f"{LAYER}self_attn.{p}_proj.weight" for p in "qk")
    stored[q], stored[k] = stored[k], stored[q]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("model.norm.weight"), ["missing tensor model.norm.weight"]),
        (without(f"{EXPERTS}7.up_proj.weight"), [f"missing tensor {EXPERTS}7.up_proj.weight"]),
        (without(f"{LAYER}self_attn.v_proj.weight"), [f"missing tensor {LAYER}self_attn.v_proj.weight"]),
        (put("model.layers.2.surprise", 3), ["unknown tensor model.layers.2.surprise"]),
        (put(f"{EXPERTS}8.up_proj.weight", 64, 128), [f"unknown tensor {EXPERTS}8.up_proj.weight"]),
        (put("lm_head.weight", 512, 64), ["lm_head.weight is [512, 64], expected [512, 128]"]),
        (put(f"{EXPERTS}3.down_proj.weight", 64, 128), ["is [64, 128], expected [128, 64]"]),
        (put("model.norm.weight", 1, 128), ["model.norm.weight is [1, 128], expected [128]"]),
        (put("model.norm.weight"), ["model.norm.weight is [], expected [128]"]),
        (swap_q_and_k, ["q_proj.weight is [64, 128], expected [128, 128]"]),
        (put("lm_head.weight", 512, 128, dtype=torch.float16), ["lm_head.weight is F16", "BF16 or F32"]),
        (put(f"{LAYER}self_attn.sinks", 4), ["L2.w.sinks", "two forms", "softmax_offset", "self_attn.sinks"]),
        (put(f"{EXPERTS}gate_up_proj", 8, 128, 128), ["two forms", f"{EXPERTS}gate_up_proj"]),
    ],
)
def test_refused(change: Callable, words: list[str], stored: dict[str, Tensor], load: Callable, tmp_path: Path) -> None:
    change(stored)
    with pytest.raises(CheckpointError) as caught:
        load(stored)
    text = str(caught.value)
    assert "\n" not in text and str(tmp_path) in text and all(word in text for word in words), text


def test_many_missing_tensors_make_a_short_message(stored: dict[str, Tensor], load: Callable) -> None:
    kept = {k.replace("gate_proj", "w1"): v for k, v in stored.items()}
    with pytest.raises(CheckpointError, match=r"and 34 more \(it holds unknown tensors .*w1") as caught:
        load(kept)
    assert len(str(caught.value)) < 1000


def test_a_bf16_checkpoint_is_refused_by_an_nvfp4_graph(published: Path, tiny: BoundModel) -> None:
    with pytest.raises(CheckpointError, match="compile for bf16"):
        open_checkpoint(published).load(build(tiny, "nvfp4"), tiny)


def test_config_from_elsewhere(published: Path, stored: dict[str, Tensor], tiny: BoundModel, tmp_path: Path) -> None:
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path)
    for config in (published, published / "config.json"):
        model = open_checkpoint(tmp_path, config).bind(load_spec("flint"))
        assert model.dims == tiny.dims and model.layer_sets == tiny.layer_sets and model.numbers == tiny.numbers


def test_config_that_contradicts_the_weights(published: Path, tmp_path: Path) -> None:
    config = json.loads((published / "config.json").read_text()) | {"moe_intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(published, tmp_path)
    model = checkpoint.bind(load_spec("flint"))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[64, 128\], expected \[48, 128\]"):
        checkpoint.load(build(model), model)
