"""A checkpoint in a folder: config.json beside model.safetensors or its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flintc.checkpoint.checkpoint import SpecMatch, WeightsFormat
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.reading import DataFile, Extent, SliceReader
from flintc.checkpoint.safetensors_folder import inside, scan_folder
from flintc.checkpoint.streamed import PLAIN, StreamedCheckpoint
from flintc.checkpoint.weights import Shape, StoredWeight, find_weights
from flintc.errors import CheckpointError
from flintc.ir.graph import Graph
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel, Spec, bind_config

CONFIG = "config.json"
#: Ends the names of block scales in a checkpoint of packed weights.
PACKED_SCALE = "_scale"


def open_safetensors(folder: Path, config: Path | None = None) -> SafetensorsCheckpoint:
    """Read config.json and every header of ``folder``; CheckpointError names what is missing or damaged.

    config: folder or file that stands in for the config.json in ``folder``.
    """
    source = config if config is not None and not config.is_dir() else inside(config or folder, CONFIG)
    metadata, tensors = read_json(source), scan_folder(folder)
    if any(name.endswith(PACKED_SCALE) for name in tensors):
        from flintc.checkpoint.modelopt import ModeloptCheckpoint

        return ModeloptCheckpoint(folder, source, metadata, tensors)
    return SafetensorsCheckpoint(folder, source, metadata, tensors)


class SafetensorsCheckpoint(StreamedCheckpoint):
    """An opened folder of safetensors; see :class:`flintc.checkpoint.Checkpoint`."""

    weights_format: WeightsFormat = "bf16"

    def __init__(self, path: Path, config: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Extent]) -> None:
        super().__init__(path, metadata)
        self.config = config
        self.tensors = tensors

    @property
    def spec_match(self) -> SpecMatch:
        """The first of config.json's ``architectures``."""
        names = self.metadata.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(f"{self.config}: no `architectures`", remedy="name the model's architecture there")
        return SpecMatch(architecture=names[0])

    def bind(self, spec: Spec) -> BoundModel:
        """``spec`` with the sizes of config.json."""
        return bind_config(spec, self.metadata, str(self.config))

    @property
    def files(self) -> list[DataFile]:
        """The single file or the shards."""
        return list({tensor.file: None for tensor in self.tensors.values()})

    def find(self, graph: Graph, model: BoundModel) -> list[StoredWeight]:
        """See :class:`flintc.checkpoint.Checkpoint`."""
        weights = find_weights(graph, model, self._shapes(), "safetensors", str(self.path))
        for weight in weights:
            self._check_types(weight)
        return weights

    def extents(self, weight: StoredWeight) -> list[Extent]:
        """The tensors of its pieces."""
        return [self.tensors[piece.tensor] for piece in weight.pieces]

    def _shapes(self) -> dict[str, Shape]:
        """Shapes, in values, of the stored tensors that are weights."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def _check_types(self, weight: StoredWeight) -> None:
        if weight.value.type.dtype == "nvfp4":
            raise CheckpointError(
                f"{self.path}: holds BF16 weights, the model is compiled for NVFP4",
                remedy="compile for bf16, or pass an NVFP4 checkpoint",
            )
        for piece in weight.pieces:
            tensor = self.tensors[piece.tensor]
            if tensor.kind not in PLAIN:
                raise CheckpointError(
                    f"{tensor.file.path}: tensor {tensor.name} is {tensor.kind}, expected {' or '.join(PLAIN)}",
                    remedy="convert the checkpoint to BF16",
                )

    def _plain(self, name: str) -> Extent:
        return self.tensors[name]

    def _packed(self, weight: StoredWeight, source: SliceReader, device: torch.device | str) -> Nvfp4:
        raise AssertionError(f"{weight.value.name}: no weight here is packed")

    def _note(self, weights: Sequence[StoredWeight], model: BoundModel, rounded: Sequence[str]) -> None:
        if rounded:
            self.report.notes.append(f"{len(rounded)} FP32 tensors were rounded to BF16, {rounded[0]} the first")
