"""A checkpoint in a folder: config.json beside model.safetensors or its shards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flintc.checkpoint.checkpoint import LoadReport, Progress, SpecMatch, WeightsFormat
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.safetensors_folder import inside, scan_folder
from flintc.checkpoint.safetensors_header import DAMAGED, StoredTensor
from flintc.checkpoint.weights import StoredWeight, find_weights
from flintc.errors import CheckpointError
from flintc.ir.graph import Graph
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel, Spec, bind_config

CONFIG = "config.json"
#: What weights may be stored as. BF16 is widened exactly where the graph asks for FP32; FP32 is rounded where it
#: asks for BF16, and the report says so. FP16 is refused: it is no published form, and would be rounded twice.
STORED_TYPES = ("BF16", "F32")


def open_safetensors(folder: Path, config: Path | None = None) -> SafetensorsCheckpoint:
    """Read config.json and every header of ``folder``; CheckpointError names what is missing or damaged.

    config: folder or file that stands in for the config.json in ``folder``.
    """
    source = config if config is not None and not config.is_dir() else inside(config or folder, CONFIG)
    return SafetensorsCheckpoint(folder, source, read_json(source), scan_folder(folder))


class SafetensorsCheckpoint:
    """An opened folder of safetensors; see :class:`flintc.checkpoint.Checkpoint`."""

    weights_format: WeightsFormat = "bf16"

    def __init__(
        self, path: Path, config: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.path = path
        self.config = config
        self.metadata = metadata
        self.tensors = tensors
        self.report = LoadReport()

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

    def load(
        self,
        graph: Graph,
        model: BoundModel,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        *,
        keep_fp32: bool = False,
    ) -> dict[str, Tensor | Nvfp4]:
        """Every weight of ``graph``: BF16 or FP32 as the graph says; see :class:`flintc.checkpoint.Checkpoint`."""
        self.report = LoadReport()
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        weights = find_weights(graph, model, shapes, "safetensors", str(self.path))
        self._check_types(weights)
        result: dict[str, Tensor | Nvfp4] = {}
        rounded: list[str] = []
        with ExitStack() as stack:
            reader = _Reader(stack)
            for done, weight in enumerate(weights, 1):
                dtype = self._dtype(weight, keep_fp32)
                result[weight.value.name] = self._assemble(weight, dtype, device, reader)
                if dtype == torch.bfloat16:
                    rounded += self._stored_fp32(weight)
                if progress is not None:
                    progress(done, len(weights), weight.value.name)
        if rounded:
            self.report.notes.append(f"{len(rounded)} FP32 tensors were rounded to BF16, {rounded[0]} the first")
        return result

    def _check_types(self, weights: list[StoredWeight]) -> None:
        for weight in weights:
            if weight.value.type.dtype == "nvfp4":
                raise CheckpointError(
                    f"{self.path}: holds BF16 weights, the model is compiled for NVFP4",
                    remedy="compile for bf16, or pass an NVFP4 checkpoint",
                )
            for piece in weight.pieces:
                tensor = self.tensors[piece.tensor]
                if tensor.dtype not in STORED_TYPES:
                    raise CheckpointError(
                        f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, expected {' or '.join(STORED_TYPES)}",
                        remedy="convert the checkpoint to BF16",
                    )

    def _dtype(self, weight: StoredWeight, keep_fp32: bool) -> torch.dtype:
        wide = weight.value.type.dtype == "f32" or (keep_fp32 and self._stored_fp32(weight))
        return torch.float32 if wide else torch.bfloat16

    def _stored_fp32(self, weight: StoredWeight) -> list[str]:
        return [piece.tensor for piece in weight.pieces if self.tensors[piece.tensor].dtype == "F32"]

    def _assemble(
        self, weight: StoredWeight, dtype: torch.dtype, device: torch.device | str, reader: _Reader
    ) -> Tensor:
        whole = torch.empty(weight.shape, dtype=dtype, device=device)
        for piece in weight.pieces:
            target = whole if piece.expert is None else whole[piece.expert]
            rows = target[..., piece.rows, :] if target.ndim > 1 else target[piece.rows]
            rows.copy_(reader.read(self.tensors[piece.tensor]))
            self.report.used.append(piece.tensor)
        return whole


class _Reader:
    """Reads tensors, opening each file once; the files close with ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def read(self, tensor: StoredTensor) -> Tensor:
        """The tensor on the CPU, as stored."""
        try:
            if tensor.file not in self._open:
                self._open[tensor.file] = self._stack.enter_context(safe_open(tensor.file, framework="pt"))
            found: Tensor = self._open[tensor.file].get_tensor(tensor.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}", remedy=DAMAGED) from None
        return found
