"""Synthetic GGUF checkpoints: published form, deterministic, atomic, peaked."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from oracle.driver import Driver

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.gguf_metadata import published_metadata
from flintc.checkpoint.synth_gguf import synth_gguf
from flintc.errors import CheckpointError, UsageError
from flintc.ir.build import build
from flintc.spec import BoundModel, bind_defaults, bind_gguf, load_spec


@pytest.fixture(scope="module")
def model() -> BoundModel:
    return bind_defaults(load_spec("specs/tiny-flint.yaml"))


@pytest.fixture(scope="module")
def file(model: BoundModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth_gguf(model, tmp_path_factory.mktemp("synth") / "tiny.gguf")


def test_binding_the_metadata_gives_the_model_again(model: BoundModel) -> None:
    again = bind_gguf(model.spec, published_metadata(model), "x.gguf")
    assert (again.dims, again.layer_sets) == (model.dims, model.layer_sets)
    assert again.numbers == pytest.approx(model.numbers, rel=1e-7)


def test_package_gguf_reads_the_published_form(model: BoundModel, file: Path) -> None:
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    shapes = {name: (t.tensor_type.name, t.shape.tolist()) for name, t in tensors.items()}
    assert shapes["token_embd.weight"] == ("BF16", [128, 512])
    assert shapes["output.weight"] == ("NVFP4", [128, 512])
    assert shapes["output.scale"] == ("F32", [1])
    assert shapes["output_norm.weight"] == ("F32", [128])
    assert shapes["blk.0.attn_k.weight"] == ("NVFP4", [128, 64])
    assert shapes["blk.0.attn_sinks.weight"] == ("F32", [4])
    assert shapes["blk.1.ffn_down.weight"] == ("NVFP4", [192, 128])
    assert shapes["blk.2.ffn_gate_inp.weight"] == ("F32", [128, 8])
    assert shapes["blk.2.ffn_gate_exps.weight"] == ("NVFP4", [128, 64, 8])
    assert shapes["blk.2.ffn_gate_exps.scale"] == ("F32", [8])
    assert shapes["blk.5.ffn_down_shexp.weight"] == ("NVFP4", [128, 128])
    assert len(tensors) == 3 + 1 + 6 * (5 + 2 * 4) + 2 * 2 * 3 + 4 * (1 + 2 * 6)
    gate, up = (tensors[f"blk.2.ffn_{part}_exps.scale"].data for part in ("gate", "up"))
    assert np.array_equal(gate, up) and len(np.unique(gate)) == 8


def test_it_loads_and_uses_every_tensor(model: BoundModel, file: Path) -> None:
    checkpoint = open_checkpoint(file)
    assert checkpoint.bind(model.spec).dims == model.dims
    checkpoint.load(build(model, "nvfp4"), model)
    assert sorted(checkpoint.report.used) == sorted(t.name for t in gguf.GGUFReader(file).tensors)


def test_next_token_distributions_are_peaked_and_differ(file: Path) -> None:
    random = np.random.default_rng(0)
    logits = Driver(file, "rounded").feed(random.integers(0, 512, 60).tolist()).double()
    p = logits.softmax(-1)
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
    assert 0.5 < float(entropy.mean()) < 4 < np.log(512)
    assert logits.argmax(-1).unique().numel() > 20


def test_equal_seeds_give_equal_bytes(model: BoundModel, file: Path, tmp_path: Path) -> None:
    assert synth_gguf(model, tmp_path / "a.gguf").read_bytes() == file.read_bytes()
    assert synth_gguf(model, tmp_path / "b.gguf", seed=1).read_bytes() != file.read_bytes()


def test_tiny_is_written_within_a_second(model: BoundModel, tmp_path: Path) -> None:
    start = time.perf_counter()
    synth_gguf(model, tmp_path / "a.gguf")
    assert time.perf_counter() - start < 1


def test_failures_leave_nothing_behind(model: BoundModel, tmp_path: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth_gguf(model, tmp_path / "a.gguf", progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.gguf").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        synth_gguf(model, tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_text() == "precious"


def test_a_disk_too_small_is_noticed_before_writing(
    model: BoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000}))
    with pytest.raises(UsageError, match="do not fit"):
        synth_gguf(model, tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("expert_feed_forward_length", 48), ("embedding_length", 96)])
def test_sizes_that_blocks_cannot_hold_are_refused(model: BoundModel, tmp_path: Path, key: str, value: int) -> None:
    metadata = published_metadata(model) | {f"flint.{key}": value, "flint.expert_shared_count": 2}
    metadata["flint.expert_shared_feed_forward_length"] = 2 * int(metadata["flint.expert_feed_forward_length"])
    odd = bind_gguf(model.spec, metadata, "x.gguf")
    with pytest.raises(UsageError, match=f"rows of {value} values are no whole blocks"):
        synth_gguf(odd, tmp_path / "a.gguf")


def test_dense_layers_must_come_first(model: BoundModel) -> None:
    sets = {**model.layer_sets, "dense": frozenset({1})}
    other = BoundModel(model.spec, model.dims, model.numbers, sets)
    with pytest.raises(UsageError, match=r"layers \[1\] \(dense\) cannot be stated"):
        published_metadata(other)


def test_truncation_is_noticed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="past the end of the file"):
        open_checkpoint(tmp_path / "cut.gguf")


def test_block_scales_are_canonical(file: Path) -> None:
    head = next(t for t in gguf.GGUFReader(file).tensors if t.name == "output.weight")
    heads = torch.from_numpy(head.data.copy()).reshape(-1, 36)[:, :4]
    assert int(heads.min()) == 0x30 and int(heads.max()) == 0x3F
