"""Converts checkpoints to NVFP4: as one GGUF file, or as safetensors in ModelOpt's layout.

What is NVFP4 already is rearranged and keeps its numbers exactly; BF16 is quantised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flintc.checkpoint.checkpoint import Checkpoint, Progress, open_checkpoint
from flintc.checkpoint.config_json import published_config
from flintc.checkpoint.convert_text import copy_text, folder_text, gguf_text
from flintc.checkpoint.gguf_metadata import published_metadata
from flintc.checkpoint.gguf_scan import BF16, F32, NVFP4, MetaValue
from flintc.checkpoint.gguf_writer import PlannedTensor as GgufTensor
from flintc.checkpoint.gguf_writer import write_gguf
from flintc.checkpoint.modelopt import SCALE, SCALE_2
from flintc.checkpoint.nvfp4 import to_ggml
from flintc.checkpoint.quantize import QuantizationError, largest_magnitude, quantization_error, quantize, tensor_scale
from flintc.checkpoint.safetensors_writer import PlannedTensor, write_shards
from flintc.checkpoint.synth import SHARD_BYTES, new_folder
from flintc.checkpoint.weights import FileFormat, Piece, Shape, part_shapes, weight_forms, weight_values
from flintc.errors import CheckpointError, UsageError
from flintc.ir.build import build
from flintc.ir.graph import Value
from flintc.reference.nvfp4 import BLOCK, Nvfp4
from flintc.spec import BoundModel, Spec, spec_for


@dataclass
class ConvertReport:
    """What a conversion made.

    errors: of every tensor that was quantised, by its name in the target. notes: one line for whatever was lost.
    """

    files: list[Path] = field(default_factory=list)
    errors: dict[str, QuantizationError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    target: str | Path,
    form: Literal["gguf", "safetensors"],
    *,
    spec: Spec | None = None,
    config: str | Path | None = None,
    device: torch.device | str = "cpu",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write the checkpoint ``source`` as NVFP4: a file (gguf) or a folder (safetensors) named ``target``.

    spec: of the model; found by what the checkpoint says of itself if absent. device: where quantising and repacking
    run. Streams: memory holds about one weight. CheckpointError as for loading; UsageError where ``target`` exists,
    the disk is too small, or a size does not fit NVFP4 blocks; then nothing is left behind.
    """
    checkpoint = open_checkpoint(source, config)
    match = checkpoint.spec_match
    spec = spec or spec_for(match.architecture, match.gguf)
    job = _Conversion(checkpoint, checkpoint.bind(spec), form, device, progress)
    if form == "gguf":
        job.write_gguf(Path(target))
    else:
        job.write_safetensors(Path(target), shard_bytes)
    job.report.notes += checkpoint.report.notes
    return job.report


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor to write: its name, its shape in values, and its place in a weight."""

    piece: Piece
    shape: Shape


class _Conversion:
    """One checkpoint on its way to one form."""

    def __init__(
        self,
        source: Checkpoint,
        model: BoundModel,
        form: FileFormat,
        device: torch.device | str,
        progress: Progress | None,
    ) -> None:
        self.source, self.model, self.device, self.progress = source, model, device, progress
        self.report = ConvertReport()
        values = weight_values(build(model, "nvfp4"))
        self.targets = {value.name: (value, _targets(model, value, form)) for value in values}

    def weights(self) -> Iterator[tuple[Value, list[_Target], Tensor | Nvfp4]]:
        """Every weight as it is to be written, and the tensors to write it as."""
        graph = build(self.model, self.source.weights_format)
        for done, (name, weight) in enumerate(self.source.stream(graph, self.model, self.device), 1):
            value, targets = self.targets[name]
            if value.type.dtype == "nvfp4" and isinstance(weight, Tensor):
                weight = self.quantized(name, weight, targets)
            yield value, targets, weight
            if self.progress is not None:
                self.progress(done, len(self.targets), name)

    def quantized(self, name: str, weight: Tensor, targets: list[_Target]) -> Nvfp4:
        """Under one tensor scale for the whole weight, or one per expert."""
        try:
            packed = quantize(weight, tensor_scale(largest_magnitude(weight)))
        except ValueError as error:
            raise CheckpointError(f"{self.source.path}: {name}: {error}") from None
        for t in targets:
            self.report.errors[t.piece.tensor] = quantization_error(_part(weight, t.piece), _slice(packed, t.piece))
        return packed

    def write_gguf(self, path: Path) -> None:
        """One file, each packed tensor followed by its ``.scale``."""
        planned = [p for value, targets in self.targets.values() for t in targets for p in _gguf_plan(value, t)]
        text, lost = self.gguf_text()
        self.note_lost(lost)
        write_gguf(path, {**published_metadata(self.model), **text}, planned, self.gguf_data())
        self.report.files = [path]

    def gguf_text(self) -> tuple[dict[str, MetaValue], str | None]:
        """Metadata of the tokenizer."""
        if not self.source.path.is_dir():
            return {k: v for k, v in self.source.metadata.items() if k.startswith("tokenizer.")}, None
        return gguf_text(self.source.path, self.model.dims["vocab"])

    def gguf_data(self) -> Iterator[Tensor]:
        for _, targets, weight in self.weights():
            for t in targets:
                part = _slice(weight, t.piece) if isinstance(weight, Nvfp4) else _part(weight, t.piece)
                if isinstance(part, Nvfp4):
                    yield to_ggml(part.codes, part.scales).flatten().cpu()
                    yield part.scale.cpu().view(torch.uint8)
                else:
                    yield part.flatten().view(torch.uint8).cpu()

    def write_safetensors(self, path: Path, shard_bytes: int) -> None:
        """A folder with config.json, shards and what the source says about text."""
        planned = [p for value, targets in self.targets.values() for t in targets for p in _folder_plan(value, t)]
        with new_folder(path, sum(t.nbytes for t in planned)) as folder:
            write_shards(folder, planned, self.folder_data(), shard_bytes)
            config = published_config(_in_decimal(self.model)) | {
                "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": BLOCK}
            }
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            self.copy_text(folder)
        self.report.files = sorted(path.iterdir())

    def folder_data(self) -> Iterator[Tensor]:
        for _, targets, weight in self.weights():
            for t in targets:
                if isinstance(weight, Nvfp4):
                    part = _slice(weight, t.piece).to("cpu")
                    yield part.codes
                    yield part.scales.view(torch.float8_e4m3fn)
                    yield part.scale if len(t.shape) == 3 else part.scale.reshape(())
                else:
                    yield _part(weight, t.piece).cpu()

    def copy_text(self, folder: Path) -> None:
        if self.source.path.is_dir():
            copy_text(self.source.path, folder)
            return
        files, lost = folder_text(self.source.metadata)
        self.note_lost(lost)
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")

    def note_lost(self, reason: str | None) -> None:
        if reason is not None:
            self.report.notes.append(f"the tokenizer was not carried over: {reason}")


def _targets(model: BoundModel, value: Value, form: FileFormat) -> list[_Target]:
    """The tensors of a weight in the first way that ``form`` may store it."""
    targets = []
    for part, shapes in part_shapes(model, value, weight_forms(model, value, form)[0]):
        first = 0
        for name, shape in zip(part.tensors, shapes, strict=True):
            stop = first + shape[max(len(shape) - 2, 0)]
            targets.append(_Target(Piece(name, slice(first, stop), part.expert), shape))
            first = stop
    return targets


def _part(whole: Tensor, piece: Piece) -> Tensor:
    """The rows of ``whole`` that ``piece`` covers."""
    of_expert = whole if piece.expert is None else whole[piece.expert]
    return of_expert[..., piece.rows, :] if of_expert.ndim > 1 else of_expert[piece.rows]


def _slice(whole: Nvfp4, piece: Piece) -> Nvfp4:
    """The rows of ``whole`` that ``piece`` covers, whose tensor scale is one value, or one per expert."""
    scale = _part(whole.row_scale()[..., None], piece)[..., 0]
    if not bool((scale == scale[..., :1]).all()):
        raise CheckpointError(f"{piece.tensor}: its rows have different tensor scales, which it cannot hold")
    one = scale[..., :1].flatten().clone(memory_format=torch.contiguous_format)  # an expanded value has no stride
    return Nvfp4(_part(whole.codes, piece), _part(whole.scales, piece), one)


def _gguf_plan(value: Value, target: _Target) -> list[GgufTensor]:
    name, shape = target.piece.tensor, target.shape
    if value.type.dtype != "nvfp4":
        return [GgufTensor(name, BF16 if value.type.dtype == "bf16" else F32, shape)]
    if shape[-1] % NVFP4.values:
        message = f"{name}: rows of {shape[-1]} values are no whole blocks of {NVFP4.values}"
        raise UsageError(message, remedy="convert to safetensors instead")
    scale = GgufTensor(f"{name.removesuffix('.weight')}.scale", F32, shape[:1] if len(shape) == 3 else (1,))
    return [GgufTensor(name, NVFP4, shape), scale]


def _folder_plan(value: Value, target: _Target) -> list[PlannedTensor]:
    name, shape = target.piece.tensor, target.shape
    if value.type.dtype != "nvfp4":
        return [PlannedTensor(name, torch.bfloat16 if value.type.dtype == "bf16" else torch.float32, shape)]
    *rows, columns = shape
    return [
        PlannedTensor(name, torch.uint8, (*rows, columns // 2)),
        PlannedTensor(f"{name}{SCALE}", torch.float8_e4m3fn, (*rows, columns // BLOCK)),
        PlannedTensor(f"{name}{SCALE_2}", torch.float32, shape[:1] if len(shape) == 3 else ()),
    ]


def _in_decimal(model: BoundModel) -> BoundModel:
    """Numbers that came from FP32 as the shortest decimal of the same FP32 value: 1e-06, not 9.99999997e-07."""
    short = {k: float(str(np.float32(v))) if float(np.float32(v)) == v else v for k, v in model.numbers.items()}
    return replace(model, numbers=short)
