"""Weights on the GPU: repacked there to the bits that the CPU makes, and never twice in its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flintc import api
from flintc.bench.memory import AnonymousPeak
from flintc.checkpoint import LoadReport, open_checkpoint, reading
from flintc.checkpoint.convert import convert
from flintc.ir.build import build
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.loading import load_weights
from flintc.spec import spec_for

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
#: A layer of experts as large as the full model's, two dense ones, few words.
ONE_FULL_LAYER = {"layers": 3, "vocab": 1024}


def load(path: Path, device: str, prepared: Path | None = None) -> tuple[dict[str, Tensor | Nvfp4], LoadReport]:
    """The weights, and the report of loading them."""
    checkpoint = open_checkpoint(path)
    match = checkpoint.spec_match
    model = checkpoint.bind(spec_for(match.architecture, match.gguf))
    weights = load_weights(checkpoint, build(model, checkpoint.weights_format), model, device, prepared)
    return weights, checkpoint.report


def parts(weight: Tensor | Nvfp4) -> list[Tensor]:
    """Tensors of a weight, those of a packed one in the order of kernels."""
    if isinstance(weight, Tensor):
        return [weight]
    packed = weight.in_kernel_order()
    return [packed.codes, packed.scales, packed.scale]


def check_same(on_gpu: dict[str, Tensor | Nvfp4], on_cpu: dict[str, Tensor | Nvfp4]) -> None:
    assert list(on_gpu) == list(on_cpu)
    for name, weight in on_gpu.items():
        assert isinstance(weight, Tensor) or weight.ordered
        for ours, theirs in zip(parts(weight), parts(on_cpu[name]), strict=True):
            assert ours.is_cuda and ours.dtype == theirs.dtype, name
            assert torch.equal(ours.cpu(), theirs), name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("forms")
    convert(EXAMPLE / "tiny-flint.gguf", folder / "modelopt", "safetensors")
    api.synth("tiny-flint", folder / "synth.gguf", format="gguf", seed=3)
    return {
        "gguf": EXAMPLE / "tiny-flint.gguf",
        "bf16": EXAMPLE,
        "modelopt": folder / "modelopt",
        "synth": folder / "synth.gguf",
    }


@pytest.mark.parametrize("slice_bytes", [reading.SLICE_BYTES, 5000])
@pytest.mark.parametrize("form", ["gguf", "bf16", "modelopt", "synth"])
def test_every_form_loads_as_on_the_cpu(
    form: str, slice_bytes: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", slice_bytes)
    path = checkpoints[form]
    check_same(load(path, "cuda")[0], load(path, "cpu")[0])


@pytest.mark.parametrize("form", ["gguf", "bf16"])
@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
def test_a_prepared_copy_serves_both(form: str, made_on: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = checkpoints[form]
    plain = load(path, "cpu")[0]
    made, report = load(path, made_on, tmp_path)
    assert report.source == "checkpoint"
    if made_on == "cuda":
        check_same(made, plain)
    read, report = load(path, "cuda", tmp_path)
    assert report.source == "prepared"
    check_same(read, plain)


@pytest.fixture(scope="module")
def full_layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("full") / "layer.gguf"
    api.synth("flint", path, format="gguf", sizes=ONE_FULL_LAYER)
    yield path
    path.unlink()


def _asked_for() -> int:
    """Bytes of GPU memory that are in use, without what the allocator rounds a tensor up by."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.mark.parametrize("how", ["plain", "making a copy", "from a copy"])
def test_memory_while_loading(how: str, full_layer: Path, tmp_path: Path) -> None:
    """Besides the weights the GPU holds what is on its way, less than the largest weight; so does the host."""
    prepared = None if how == "plain" else tmp_path
    if how == "from a copy":
        load(full_layer, "cpu", tmp_path)
    torch.cuda.empty_cache()
    before, asked = torch.cuda.memory_allocated(), _asked_for()
    with AnonymousPeak() as host:
        weights, report = load(full_layer, "cuda", prepared)
    assert report.source == ("prepared" if how == "from a copy" else "checkpoint")
    largest = max(weight.nbytes for weight in weights.values())
    assert largest > 250e6
    assert report.device_peak is not None
    peak, after = report.device_peak - before, _asked_for() - asked
    print(how, report, f"peak {peak / 1e6:.0f} MB, weights {report.weight_bytes / 1e6:.0f} MB, host {host.nbytes}")
    assert report.weight_bytes <= after < report.weight_bytes + 1e6, "something else is kept"
    assert report.weight_bytes < peak < report.weight_bytes + largest
    assert host.nbytes is not None and host.nbytes < 4 << 30
