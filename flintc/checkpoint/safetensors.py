"""A checkpoint in a folder: config.json beside model.safetensors or its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from flintc.checkpoint.weights import Shape, StoredWeight, collect, find_weights, weight_values
from flintc.errors import CheckpointError
from flintc.ir.graph import Graph
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel, Spec, bind_config

CONFIG = "config.json"
#: What weights may be stored as. BF16 is widened exactly where the graph asks for FP32; FP32 is rounded where it
#: asks for BF16, and the report says so. FP16 is refused: it is no published form, and would be rounded twice.
STORED_TYPES = ("BF16", "F32")
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
        """Every weight of ``graph``: of the type the graph gives it; see :class:`flintc.checkpoint.Checkpoint`."""
        return collect(self.stream(graph, model, device, keep_fp32=keep_fp32), len(weight_values(graph)), progress)

    def stream(
        self, graph: Graph, model: BoundModel, device: torch.device | str = "cpu", *, keep_fp32: bool = False
    ) -> Iterator[tuple[str, Tensor | Nvfp4]]:
        """Name and value of every weight of ``graph``, one in memory at a time."""
        self.report = LoadReport()
        weights = find_weights(graph, model, self._shapes(), "safetensors", str(self.path))
        for weight in weights:
            self._check_types(weight)
        rounded: list[str] = []
        with ExitStack() as stack:
            reader = TensorReader(stack)
            for weight in weights:
                value = self._weight(weight, device, reader, keep_fp32)
                if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                    rounded += self._stored_fp32(weight)
                yield weight.value.name, value
        if rounded:
            self.report.notes.append(f"{len(rounded)} FP32 tensors were rounded to BF16, {rounded[0]} the first")

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
            if tensor.dtype not in STORED_TYPES:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, expected {' or '.join(STORED_TYPES)}",
                    remedy="convert the checkpoint to BF16",
                )

    def _weight(
        self, weight: StoredWeight, device: torch.device | str, reader: TensorReader, keep_fp32: bool
    ) -> Tensor | Nvfp4:
        return self._assemble(weight, self._dtype(weight, keep_fp32), device, reader)

    def _dtype(self, weight: StoredWeight, keep_fp32: bool) -> torch.dtype:
        wide = weight.value.type.dtype == "f32" or (keep_fp32 and self._stored_fp32(weight))
        return torch.float32 if wide else torch.bfloat16

    def _stored_fp32(self, weight: StoredWeight) -> list[str]:
        return [piece.tensor for piece in weight.pieces if self.tensors[piece.tensor].dtype == "F32"]

    def _assemble(
        self, weight: StoredWeight, dtype: torch.dtype, device: torch.device | str, reader: TensorReader
    ) -> Tensor:
        whole = torch.empty(weight.shape, dtype=dtype, device=device)
        for piece in weight.pieces:
            target = whole if piece.expert is None else whole[piece.expert]
            rows = target[..., piece.rows, :] if target.ndim > 1 else target[piece.rows]
            rows.copy_(reader.read(self.tensors[piece.tensor]))
            self.report.used.append(piece.tensor)
        return whole


class TensorReader:
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
