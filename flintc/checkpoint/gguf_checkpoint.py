"""A checkpoint in one GGUF file: metadata, weights and their tensor scales, nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flintc.checkpoint.assemble import PackedAssembly
from flintc.checkpoint.checkpoint import SpecMatch, WeightsFormat
from flintc.checkpoint.gguf_refusals import check_config, check_supported
from flintc.checkpoint.gguf_scan import BF16, F32, NVFP4, GgufFile, TensorInfo
from flintc.checkpoint.gguf_tokenizer import TOKENIZER_KEYS
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.nvfp4 import ScaleError, from_ggml
from flintc.checkpoint.reading import DataFile, Extent, SliceReader
from flintc.checkpoint.safetensors_folder import inside
from flintc.checkpoint.streamed import StreamedCheckpoint
from flintc.checkpoint.weights import StoredWeight, find_weights
from flintc.errors import CheckpointError
from flintc.ir.graph import Graph
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel, Spec, bind_config, bind_gguf

ARCHITECTURE = "general.architecture"
#: Keys outside the architecture's own that are read here.
_READ = (ARCHITECTURE, "general.alignment", *TOKENIZER_KEYS)


def open_gguf(path: Path, config: Path | None = None) -> GgufCheckpoint:
    """Scan ``path`` and refuse what is not supported, by name.

    config: folder or file with a config.json that the metadata is checked against.
    """
    file = GgufFile(path)
    check_supported(file)
    source = None if config is None else config if not config.is_dir() else inside(config, "config.json")
    return GgufCheckpoint(file, None if source is None else (source, read_json(source)))


class GgufCheckpoint(StreamedCheckpoint):
    """An opened GGUF file; see :class:`flintc.checkpoint.Checkpoint`."""

    def __init__(self, file: GgufFile, config: tuple[Path, Mapping[str, Any]] | None = None) -> None:
        super().__init__(file.path, file.metadata)
        self.file = file
        packed = any(t.type == NVFP4 for t in file.tensors.values())
        self.weights_format: WeightsFormat = "nvfp4" if packed else "bf16"
        self._config = config
        self._scales = _companions(file.tensors)

    @property
    def spec_match(self) -> SpecMatch:
        """``general.architecture``."""
        name = self.metadata.get(ARCHITECTURE)
        if not isinstance(name, str):
            raise CheckpointError(f"{self.path}: no {ARCHITECTURE}", remedy="the file does not say what model it holds")
        return SpecMatch(gguf=name)

    def bind(self, spec: Spec) -> BoundModel:
        """``spec`` with the sizes of the metadata, and where that may leave one out, of the tensors."""
        inferred = {k: v for k, v in self._inferred(spec).items() if k not in self.metadata}
        model = bind_gguf(spec, {**self.metadata, **inferred}, str(self.path))
        if self._config is not None:
            source, config = self._config
            check_config(model, str(self.path), bind_config(spec, config, str(source)), str(source))
        return model

    def _inferred(self, spec: Spec) -> dict[str, int]:
        """Optional dimensions by metadata key, as the shapes of stored tensors state them."""
        found: dict[str, int] = {}
        for weight in spec.weights.values():
            names = [f for f in weight.gguf if isinstance(f, str) and f in self.file.tensors]
            shape = self.file.tensors[names[0]].shape if names else ()
            for dimension, size in zip(weight.shape, shape, strict=False):
                quantity = spec.dimensions.get(str(dimension))
                if quantity is not None and quantity.is_optional("gguf"):
                    found.update({f"{spec.match.gguf}.{key}": size for key in quantity.gguf})
        return found

    @property
    def files(self) -> list[DataFile]:
        """The file."""
        return [self.file.data]

    def find(self, graph: Graph, model: BoundModel) -> list[StoredWeight]:
        """See :class:`flintc.checkpoint.Checkpoint`."""
        companions = {scale.name for scale in self._scales.values()}
        shapes = {name: t.shape for name, t in self.file.tensors.items() if name not in companions}
        weights = find_weights(graph, model, shapes, "gguf", str(self.path))
        for weight in weights:
            self._check_types(weight)
        return weights

    def extents(self, weight: StoredWeight) -> list[Extent]:
        """Each tensor, followed by its ``.scale`` where it is packed and has one."""
        names = [piece.tensor for piece in weight.pieces]
        both = ((name, self._scales[name].name) if name in self._scales else (name,) for name in names)
        return [self.file.extent(name) for pair in both for name in pair]

    def _check_types(self, weight: StoredWeight) -> None:
        packed = weight.value.type.dtype == "nvfp4"
        for piece in weight.pieces:
            tensor = self.file.tensors[piece.tensor]
            self._check_scale(tensor)
            if tensor.type in ((NVFP4,) if packed else (BF16, F32)):
                continue
            expected = "NVFP4" if packed else "BF16 or F32"
            remedy = f"convert the checkpoint: only {expected} is read here"
            if tensor.type == NVFP4:
                remedy = "compile for nvfp4, or pass a BF16 checkpoint"
            raise CheckpointError(
                f"{self.path}: {tensor.name} is {tensor.type.name}, expected {expected}", remedy=remedy
            )

    def _check_scale(self, tensor: TensorInfo) -> None:
        """CheckpointError where the ``.scale`` of ``tensor`` is not one FP32 value, or one per expert."""
        info = self._scales.get(tensor.name)
        experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        if info is not None and (info.type != F32 or info.shape not in ((1,), (experts,))):
            raise CheckpointError(f"{self.path}: {info.name} is {info}, expected F32[{experts}]")

    def _plain(self, name: str) -> Extent:
        return self.file.extent(name)

    def _packed(self, weight: StoredWeight, source: SliceReader, device: torch.device | str) -> Nvfp4:
        """Blocks are repacked slice by slice on ``device``; CheckpointError where a scale is not a number."""
        assembly = PackedAssembly(weight, device)
        for piece in weight.pieces:
            for units, blocks in source.parts(self.file.extent(piece.tensor)):
                try:
                    codes, scales = from_ggml(blocks)
                except ScaleError as error:
                    message = f"{self.path}: {piece.tensor}: {error}"
                    raise CheckpointError(message, remedy="quantise the tensor again") from None
                assembly.put_codes(piece, units, codes)
                assembly.put_scales(piece, units, scales)
            assembly.put_scale(piece, self._tensor_scale(piece.tensor, source).to(device))
        return assembly.finish()

    def _tensor_scale(self, name: str, source: SliceReader) -> Tensor:
        """f32 [1], or [E] for stacked experts; 1.0 where the file holds no ``.scale`` for the tensor."""
        info = self._scales.get(name)
        if info is None:
            return torch.ones(1)
        scale = source.whole(self.file.extent(info.name)).view(torch.float32)
        bad = ~(torch.isfinite(scale) & (scale >= 0))
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise CheckpointError(
                f"{self.path}: {info.name}[{at}] is {float(scale[at])}, no scale", remedy="quantise the tensor again"
            )
        return scale

    def _note(self, weights: Sequence[StoredWeight], model: BoundModel, rounded: Sequence[str]) -> None:
        notes = self.report.notes
        if rounded:
            notes.append(f"{len(rounded)} F32 tensors were rounded to BF16, {rounded[0]} the first")
        names = [piece.tensor for weight in weights for piece in weight.pieces]
        without = [n for n in names if self.file.tensors[n].type == NVFP4 and n not in self._scales]
        if without:
            notes.append(f"{len(without)} tensors have no .scale, read as 1.0: {without[0]} the first")
        prefix = f"{model.spec.match.gguf}."
        ignored = [k for k in self.metadata if k in model.ignored or not (k.startswith(prefix) or k in _READ)]
        if ignored:
            notes.append(f"metadata without effect: {', '.join(sorted(ignored))}")


def _companions(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """``X.scale`` by ``X.weight``, for every NVFP4 tensor that has one."""
    pairs = {name: f"{name.removesuffix('.weight')}.scale" for name, t in tensors.items() if t.type == NVFP4}
    return {name: tensors[scale] for name, scale in pairs.items() if scale in tensors}
