"""A synthetic checkpoint in the published GGUF form: random NVFP4 weights, drawn by what they do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flintc.checkpoint.checkpoint import Progress
from flintc.checkpoint.gguf_metadata import published_metadata
from flintc.checkpoint.gguf_scan import BF16, F32, NVFP4, GgmlType, MetaValue
from flintc.checkpoint.gguf_writer import PlannedTensor, write_gguf
from flintc.checkpoint.nvfp4 import BLOCK_BYTES
from flintc.checkpoint.synth import Draw, weight_draw
from flintc.checkpoint.weights import Shape, part_shapes, weight_forms, weight_values
from flintc.errors import UsageError
from flintc.ir.build import build
from flintc.ir.graph import Graph, Value
from flintc.reference.nvfp4 import E2M1
from flintc.spec import BoundModel

#: Block scale bytes are drawn from 0x30 to 0x3F, the numbers 0.5 to 1.875.
_FIRST_SCALE, _SCALE_BITS = 0x30, 0x0F
_SCALES = torch.arange(_FIRST_SCALE, _FIRST_SCALE + _SCALE_BITS + 1).to(torch.uint8).view(torch.float8_e4m3fn).float()
#: Root mean square of a random code times a random block scale.
_PACKED_RMS = float(torch.tensor(E2M1).square().mean().sqrt() * _SCALES.square().mean().sqrt())


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A stored tensor and what it is drawn from; ``scale_of`` names the weight whose tensor scales it holds."""

    planned: PlannedTensor
    draw: Draw
    scale_of: str | None = None


def synth_gguf(
    model: BoundModel,
    path: str | Path,
    seed: int = 0,
    *,
    extras: Mapping[str, MetaValue] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write one GGUF file of ``model``'s metadata and weights; returns its path.

    Equal arguments give equal bytes. Memory holds one tensor at a time. ``extras`` is further metadata (a tokenizer).
    UsageError where ``path`` exists, the disk is too small, or a size of the model does not fit NVFP4 blocks.
    """
    path = Path(path)
    graph = build(model, "nvfp4")
    drawn = [d for value in weight_values(graph) for d in _stored(model, graph, value)]

    def data() -> Iterator[Tensor]:
        for done, d in enumerate(drawn, 1):
            yield _bytes(d, seed)
            if progress is not None:
                progress(done, len(drawn), d.planned.name)

    write_gguf(path, {**published_metadata(model), **(extras or {})}, [d.planned for d in drawn], data())
    return path


def _stored(model: BoundModel, graph: Graph, value: Value) -> Iterator[_Drawn]:
    """The tensors of a weight in its first GGUF form, each NVFP4 one followed by its ``.scale``."""
    draw = weight_draw(graph, value)
    for part, shapes in part_shapes(model, value, weight_forms(model, value, "gguf")[0]):
        for name, shape in zip(part.tensors, shapes, strict=True):
            kind = _stored_type(value)
            if shape[-1] % kind.values:
                raise UsageError(
                    f"{name}: rows of {shape[-1]} values are no whole blocks of {kind.values}",
                    remedy="make the size a multiple of 64, or write safetensors",
                )
            yield _Drawn(PlannedTensor(name, kind, shape), draw)
            if kind == NVFP4:
                experts = shape[:1] if len(shape) == 3 else (1,)
                scale = PlannedTensor(f"{name.removesuffix('.weight')}.scale", F32, experts)
                yield _Drawn(scale, draw, scale_of=value.name)


def _stored_type(value: Value) -> GgmlType:
    return {"nvfp4": NVFP4, "bf16": BF16, "f32": F32}[value.type.dtype]


def _bytes(drawn: _Drawn, seed: int) -> Tensor:
    planned, draw = drawn.planned, drawn.draw
    if drawn.scale_of is not None:
        return _tensor_scales(planned.shape, draw.deviation / _PACKED_RMS, seed, drawn.scale_of).view(torch.uint8)
    if planned.type == NVFP4:
        return _blocks(planned.nbytes, seed, planned.name)
    dtype = torch.bfloat16 if planned.type == BF16 else torch.float32
    return Draw(draw.mean, draw.deviation, dtype).tensor(planned.shape, seed, planned.name).flatten().view(torch.uint8)


def _tensor_scales(shape: Shape, middle: float, seed: int, name: str) -> Tensor:
    """f32: ``middle`` for a single scale; experts differ by up to a quarter.

    Drawn for the whole weight ``name``, so that tensors that are read as one (q, k and v) share them, as published.
    """
    if shape == (1,):
        return torch.tensor([middle])
    unit = _raw(shape[0], seed, name).astype(np.float64) / 2.0**64
    return torch.from_numpy((middle * (0.75 + 0.5 * unit)).astype(np.float32))


def _blocks(nbytes: int, seed: int, name: str) -> Tensor:
    """Random ggml blocks: codes uniform over all 16, scale bytes over those of ``_SCALES``."""
    blocks = _raw(-(-nbytes // 8), seed, name).view(np.uint8)[:nbytes].reshape(-1, BLOCK_BYTES)
    heads = blocks[:, :4]
    heads &= _SCALE_BITS
    heads |= _FIRST_SCALE
    return torch.from_numpy(blocks.reshape(-1))


def _raw(count: int, seed: int, name: str) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """``count`` random 64-bit words, the same for the same seed and name, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.SFC64(int.from_bytes(digest[:16], "little")).random_raw(count)
