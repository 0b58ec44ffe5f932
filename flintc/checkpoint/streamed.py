"""What loading is in every format: weights one after the other, from slices that are read ahead of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flintc.checkpoint.assemble import PlainAssembly
from flintc.checkpoint.checkpoint import LoadReport, Progress
from flintc.checkpoint.reading import DataFile, Extent, Observer, SliceReader
from flintc.checkpoint.weights import StoredWeight, collect, weight_values
from flintc.ir.graph import Graph
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel

#: What plain weights may be stored as, in the words of both formats. BF16 is widened exactly where the graph asks for
#: FP32; FP32 is rounded where it asks for BF16, and the report says so. FP16 is refused: it is no published form, and
#: would be rounded twice.
PLAIN = {"BF16": torch.bfloat16, "F32": torch.float32}


class StreamedCheckpoint(ABC):
    """An opened checkpoint; see :class:`flintc.checkpoint.Checkpoint`. A format says what is stored where."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.report = LoadReport()

    @property
    @abstractmethod
    def files(self) -> Sequence[DataFile]:
        """The files that hold tensors."""

    @abstractmethod
    def find(self, graph: Graph, model: BoundModel) -> list[StoredWeight]:
        """Every weight of ``graph`` and its pieces; CheckpointError where one is not there as it must be."""

    @abstractmethod
    def extents(self, weight: StoredWeight) -> list[Extent]:
        """The stored tensors of a weight in the order in which it is read."""

    @abstractmethod
    def _plain(self, name: str) -> Extent:
        """The stored tensor of a piece that is not packed."""

    @abstractmethod
    def _packed(self, weight: StoredWeight, source: SliceReader, device: torch.device | str) -> Nvfp4:
        """A packed weight, of the slices of its ``extents``."""

    @abstractmethod
    def _note(self, weights: Sequence[StoredWeight], model: BoundModel, rounded: Sequence[str]) -> None:
        """Fill ``report.notes`` after a load that rounded the tensors ``rounded`` to BF16."""

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
        self,
        graph: Graph,
        model: BoundModel,
        device: torch.device | str = "cpu",
        *,
        keep_fp32: bool = False,
        observer: Observer | None = None,
    ) -> Iterator[tuple[str, Tensor | Nvfp4]]:
        """Name and value of every weight; see :class:`flintc.checkpoint.Checkpoint`."""
        self.report = LoadReport()
        start = time.perf_counter()
        weights = self.find(graph, model)
        extents = [extent for weight in weights for extent in self.extents(weight)]
        rounded: list[str] = []
        with SliceReader(extents, device, observer) as source:
            for weight in weights:
                if weight.value.type.dtype == "nvfp4":
                    yield weight.value.name, self._packed(weight, source, device)
                else:
                    yield weight.value.name, self._assemble(weight, source, device, keep_fp32, rounded)
        self.report.used = [extent.name for extent in extents]
        self.report.nbytes = source.nbytes
        self.report.seconds = time.perf_counter() - start
        self._note(weights, model, rounded)

    def _assemble(
        self,
        weight: StoredWeight,
        source: SliceReader,
        device: torch.device | str,
        keep_fp32: bool,
        rounded: list[str],
    ) -> Tensor:
        """A plain weight; tensors that lose bits are added to ``rounded``."""
        stored = [self._plain(piece.tensor) for piece in weight.pieces]
        fp32 = [extent.name for extent in stored if extent.kind == "F32"]
        wide = weight.value.type.dtype == "f32" or (keep_fp32 and bool(fp32))
        if not wide:
            rounded += fp32
        assembly = PlainAssembly(weight, torch.float32 if wide else torch.bfloat16, device)
        for piece, extent in zip(weight.pieces, stored, strict=True):
            for units, data in source.parts(extent):
                assembly.put(piece, units, data, PLAIN[extent.kind])
        return assembly.whole
