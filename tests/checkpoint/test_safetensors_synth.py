"""Synthetic safetensors: published names and configuration, reproducible, streamed, nothing half-written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flintc.checkpoint import open_checkpoint, synth
from flintc.checkpoint.config_json import published_config
from flintc.checkpoint.synth import synth_safetensors
from flintc.errors import UsageError
from flintc.ir.build import build
from flintc.spec import BoundModel, bind_config, bind_defaults, load_spec

OTHER = Path(__file__).parent.parent / "data" / "other.yaml"


@pytest.fixture(scope="module")
def tiny() -> BoundModel:
    return bind_defaults(load_spec("tiny-flint"))


def published_names() -> dict[str, tuple[int, ...]]:
    """tiny-flint's tensors as docs and publisher list them, written out anew."""
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, 128),
        "lm_head.weight": (512, 128),
        "model.norm.weight": (128,),
    }
    for layer in range(6):
        mlp = {"mlp.gate_proj.weight": (192, 128), "mlp.up_proj.weight": (192, 128), "mlp.down_proj.weight": (128, 192)}
        if layer >= 2:
            mlp = {
                "mlp.gate.weight": (8, 128),
                "mlp.shared_expert.gate_proj.weight": (128, 128),
                "mlp.shared_expert.up_proj.weight": (128, 128),
                "mlp.shared_expert.down_proj.weight": (128, 128),
            }
            for e in range(8):
                mlp |= {f"mlp.experts.{e}.{p}_proj.weight": (64, 128) for p in ("gate", "up")}
                mlp[f"mlp.experts.{e}.down_proj.weight"] = (128, 64)
        attention = {
            "input_layernorm.weight": (128,),
            "post_attention_layernorm.weight": (128,),
            "self_attn.q_proj.weight": (128, 128),
            "self_attn.k_proj.weight": (64, 128),
            "self_attn.v_proj.weight": (64, 128),
            "self_attn.o_proj.weight": (128, 128),
            "self_attn.q_norm.weight": (32,),
            "self_attn.k_norm.weight": (32,),
            "self_attn.softmax_offset": (4,),
        }
        names |= {f"model.layers.{layer}.{name}": shape for name, shape in (attention | mlp).items()}
    return names


def test_published_names_and_types(tiny: BoundModel, tmp_path: Path) -> None:
    files = synth_safetensors(tiny, tmp_path / "tiny")
    assert [f.name for f in files] == ["config.json", "model.safetensors"]
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == published_names()
    for name, tensor in stored.items():
        wide = name.endswith(("softmax_offset", "mlp.gate.weight"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert tensor.isfinite().all() and tensor.float().std() > 0


def test_same_seed_same_bytes(tiny: BoundModel, tmp_path: Path) -> None:
    for folder, seed in (("a", 7), ("b", 7), ("c", 8)):
        synth_safetensors(tiny, tmp_path / folder, seed)
    a, b, c = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in "abc")
    assert a == b and a != c


def test_no_two_tensors_are_equal(tiny: BoundModel, tmp_path: Path) -> None:
    synth_safetensors(tiny, tmp_path / "tiny")
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    contents = {tensor.view(torch.uint8).numpy().tobytes() for tensor in stored.values()}
    assert len(contents) == len(stored)


def test_shards_and_index(tiny: BoundModel, tmp_path: Path) -> None:
    limit = 400_000
    synth_safetensors(tiny, tmp_path / "one")
    files = synth_safetensors(tiny, tmp_path / "many", shard_bytes=limit)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = [f for f in files if f.suffix == ".safetensors"]
    assert [f.name for f in shards] == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    whole = load_file(tmp_path / "one" / "model.safetensors")
    total = 0
    for shard in shards:
        stored = load_file(shard)
        size = sum(t.nbytes for t in stored.values())
        assert size <= limit
        total += size
        for name, tensor in stored.items():
            assert index["weight_map"][name] == shard.name and torch.equal(tensor, whole[name])
    assert index["metadata"]["total_size"] == total and index["weight_map"].keys() == whole.keys()


@pytest.mark.parametrize("seed", range(20))
def test_config_binds_to_the_same_model(seed: int) -> None:
    """Any layer lists and sizes survive the way through config.json."""
    rng = random.Random(seed)
    spec = load_spec("tiny-flint")
    layers = rng.randint(1, 9)
    full = frozenset(n for n in range(layers) if rng.random() < 0.5)
    dense = frozenset(n for n in range(layers) if rng.random() < 0.3)
    config = published_config(bind_defaults(spec)) | {
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if n in full else "sliding_attention" for n in range(layers)],
        "no_rope_layer_indices": sorted(full),
        "mlp_only_layers": sorted(dense),
        "num_experts": rng.choice([4, 64]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    model = bind_config(spec, config, "config.json")
    assert model.layer_sets == {"full": full, "unrotated": full, "dense": dense}
    again = bind_config(spec, published_config(model), "config.json")
    assert (again.dims, again.numbers, again.layer_sets) == (model.dims, model.numbers, model.layer_sets)
    assert again.numbers["rope_theta"] == 5e5


def test_a_model_that_is_no_flint(tmp_path: Path) -> None:
    """Another spec with other names, forms and blocks is synthesised and loaded by the same code."""
    model = bind_defaults(load_spec(OTHER))
    synth_safetensors(model, tmp_path / "other")
    checkpoint = open_checkpoint(tmp_path / "other")
    again = checkpoint.bind(load_spec(OTHER))
    assert (again.dims, again.numbers, again.layer_sets) == (model.dims, model.numbers, model.layer_sets)
    graph = build(again)
    weights = checkpoint.load(graph, again)
    assert weights.keys() == {v.name for v in graph.values.values() if v.kind == "weight"}


def test_nothing_is_left_of_a_failure(tiny: BoundModel, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        assert (folder / "model.safetensors").exists()
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        synth_safetensors(tiny, tmp_path / "tiny", extras=fail)
    assert list(tmp_path.iterdir()) == []


def test_extras_and_progress(tiny: BoundModel, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = tmp_path / "deep" / "tiny"

    def add_tokenizer(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")

    files = synth_safetensors(tiny, path, extras=add_tokenizer, progress=lambda *at: seen.append(at))
    assert path / "tokenizer.json" in files and all(f.exists() for f in files)
    count = len(published_names())
    assert seen[-1] == (count, count, "lm_head.weight") and len(seen) == count


def test_refuses_what_is_there(tiny: BoundModel, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("used", "file"):
        with pytest.raises(UsageError, match="exists already"):
            synth_safetensors(tiny, tmp_path / name)
    assert (tmp_path / "used" / "file").read_text() == (tmp_path / "file").read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be made"):
        synth_safetensors(tiny, tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    synth_safetensors(tiny, tmp_path / "empty")


def test_refuses_a_disk_that_is_too_small(tiny: BoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = synth.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UsageError, match="do not fit"):
        synth_safetensors(tiny, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []
