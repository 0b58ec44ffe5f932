"""A checkpoint in one GGUF file: metadata, weights and their tensor scales, nothing beside it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flintc.checkpoint.checkpoint import LoadReport, Progress, SpecMatch, WeightsFormat
from flintc.checkpoint.gguf_refusals import check_config, check_supported
from flintc.checkpoint.gguf_scan import BF16, F32, NVFP4, GgufFile, TensorInfo
from flintc.checkpoint.gguf_tokenizer import TOKENIZER_KEYS
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.nvfp4 import ScaleError, from_ggml
from flintc.checkpoint.packed import assemble
from flintc.checkpoint.safetensors_folder import inside
from flintc.checkpoint.weights import StoredWeight, collect, find_weights, weight_values
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


class GgufCheckpoint:
    """An opened GGUF file; see :class:`flintc.checkpoint.Checkpoint`."""

    def __init__(self, file: GgufFile, config: tuple[Path, Mapping[str, Any]] | None = None) -> None:
        self.file = file
        self.path = file.path
        self.metadata: Mapping[str, Any] = file.metadata
        self.report = LoadReport()
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

    def load(
        self,
        graph: Graph,
        model: BoundModel,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        *,
        keep_fp32: bool = False,
    ) -> dict[str, Tensor | Nvfp4]:
        """Every weight of ``graph``; see :class:`flintc.checkpoint.Checkpoint`."""
        return collect(self.stream(graph, model, device, keep_fp32=keep_fp32), len(weight_values(graph)), progress)

    def stream(
        self, graph: Graph, model: BoundModel, device: torch.device | str = "cpu", *, keep_fp32: bool = False
    ) -> Iterator[tuple[str, Tensor | Nvfp4]]:
        """Name and value of every weight; the next tensor is read while this one is repacked on ``device``."""
        self.report = LoadReport()
        start = time.perf_counter()
        companions = {scale.name for scale in self._scales.values()}
        shapes = {name: t.shape for name, t in self.file.tensors.items() if name not in companions}
        weights = find_weights(graph, model, shapes, "gguf", str(self.path))
        for weight in weights:
            self._check_types(weight)
        data = _read_ahead(self.file, [self.file.tensors[p.tensor] for weight in weights for p in weight.pieces])
        for weight in weights:
            yield weight.value.name, self._weight(weight, data, device, keep_fp32)
        self._report(weights, model, time.perf_counter() - start)

    def _check_types(self, weight: StoredWeight) -> None:
        packed = weight.value.type.dtype == "nvfp4"
        for piece in weight.pieces:
            tensor = self.file.tensors[piece.tensor]
            if tensor.type in ((NVFP4,) if packed else (BF16, F32)):
                continue
            expected = "NVFP4" if packed else "BF16 or F32"
            remedy = f"convert the checkpoint: only {expected} is read here"
            if tensor.type == NVFP4:
                remedy = "compile for nvfp4, or pass a BF16 checkpoint"
            raise CheckpointError(
                f"{self.path}: {tensor.name} is {tensor.type.name}, expected {expected}", remedy=remedy
            )

    def _weight(
        self, weight: StoredWeight, data: Iterator[Tensor], device: torch.device | str, keep_fp32: bool
    ) -> Tensor | Nvfp4:
        self.report.used += [piece.tensor for piece in weight.pieces]
        if weight.value.type.dtype == "nvfp4":
            parts = ((p, self.packed(p.tensor, next(data).to(device))) for p in weight.pieces)
            return assemble(weight, parts, device)
        stored = [self.plain(p.tensor, next(data).to(device)) for p in weight.pieces]
        wide = weight.value.type.dtype == "f32" or (keep_fp32 and any(t.dtype == torch.float32 for t in stored))
        if not wide and any(t.dtype == torch.float32 for t in stored):
            self.report.notes.append(f"{weight.value.name} is stored as F32 and was rounded to BF16")
        whole = stored[0] if len(stored) == 1 else torch.cat(stored, dim=-2)
        return whole.to(torch.float32 if wide else torch.bfloat16)

    def plain(self, name: str, data: Tensor) -> Tensor:
        """A BF16 or F32 tensor from its bytes ``data``, as stored."""
        tensor = self.file.tensors[name]
        return data.view(torch.float32 if tensor.type == F32 else torch.bfloat16).reshape(tensor.shape)

    def packed(self, name: str, data: Tensor) -> Nvfp4:
        """An NVFP4 tensor from its bytes ``data`` and its ``.scale``, on the device of ``data``.

        CheckpointError where a block scale is not a number.
        """
        rows = self.file.tensors[name].shape[:-1]
        try:
            codes, scales = from_ggml(data.reshape(*rows, -1))
        except ScaleError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}", remedy="quantise the tensor again") from None
        return Nvfp4(codes, scales, self.tensor_scale(name).to(data.device))

    def tensor_scale(self, name: str) -> Tensor:
        """f32 [1], or [E] for stacked experts; 1.0 where the file holds no ``.scale`` for the tensor."""
        shape = self.file.tensors[name].shape
        experts = shape[0] if len(shape) == 3 else 1
        info = self._scales.get(name)
        if info is None:
            return torch.ones(experts)
        if info.type != F32 or info.shape not in ((1,), (experts,)):
            raise CheckpointError(f"{self.path}: {info.name} is {info}, expected F32[{experts}]")
        scale = self.file.read(info).view(torch.float32)
        bad = ~(torch.isfinite(scale) & (scale >= 0))
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise CheckpointError(
                f"{self.path}: {info.name}[{at}] is {float(scale[at])}, no scale", remedy="quantise the tensor again"
            )
        return scale.expand(experts).clone()

    def _report(self, weights: Iterable[StoredWeight], model: BoundModel, seconds: float) -> None:
        names = [piece.tensor for weight in weights for piece in weight.pieces]
        scaled = [name for name in names if self.file.tensors[name].type == NVFP4]
        without = [name for name in scaled if name not in self._scales]
        self.report.used += [self._scales[name].name for name in scaled if name in self._scales]
        if without:
            self.report.notes.append(f"{len(without)} tensors have no .scale, read as 1.0: {without[0]} the first")
        prefix = f"{model.spec.match.gguf}."
        ignored = [k for k in self.metadata if k in model.ignored or not (k.startswith(prefix) or k in _READ)]
        if ignored:
            self.report.notes.append(f"metadata without effect: {', '.join(sorted(ignored))}")
        nbytes = sum(self.file.tensors[name].nbytes for name in names)
        self.report.notes.append(f"{nbytes / 1e9:.3f} GB in {seconds:.2f} s: {nbytes / 1e9 / seconds:.2f} GB/s")


def _companions(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """``X.scale`` by ``X.weight``, for every NVFP4 tensor that has one."""
    pairs = {name: f"{name.removesuffix('.weight')}.scale" for name, t in tensors.items() if t.type == NVFP4}
    return {name: tensors[scale] for name, scale in pairs.items() if scale in tensors}


def _read_ahead(file: GgufFile, tensors: Iterable[TensorInfo]) -> Iterator[Tensor]:
    """Data of ``tensors`` in order, each read while the one before it is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="gguf-read") as pool:
        coming: deque[Future[Tensor]] = deque()
        for tensor in tensors:
            coming.append(pool.submit(file.read, tensor))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
