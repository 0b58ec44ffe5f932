"""What every checkpoint format offers, and the choice of format by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from flintc.checkpoint.reading import DataFile, Extent, Observer
from flintc.checkpoint.weights import StoredWeight
from flintc.errors import CheckpointError
from flintc.ir.graph import Graph
from flintc.reference.nvfp4 import Nvfp4

if TYPE_CHECKING:
    from flintc.spec import BoundModel, Spec

WeightsFormat = Literal["bf16", "nvfp4"]
#: Called as weights arrive: (weights loaded so far, weights in all, name of the weight).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class SpecMatch:
    """What a checkpoint says of itself, as ``match:`` in a spec names it; the fields of ``spec_for``.

    architecture: an entry of config.json's ``architectures``. gguf: ``general.architecture`` of a GGUF file.
    """

    architecture: str | None = None
    gguf: str | None = None


@dataclass
class LoadReport:
    """What a load did with the file.

    used: names of the stored tensors that became weights. notes: one line for everything done to values on the
    way (a rounding, say) and for metadata that was ignored. nbytes: read from files, in seconds of the clock.
    source: the checkpoint's own files, or a prepared copy of it. weight_bytes: of the weights in memory. device_peak:
    most GPU memory that torch had given out while they were loaded, in bytes; None on the CPU.
    """

    used: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    source: Literal["checkpoint", "prepared"] = "checkpoint"
    weight_bytes: int = 0
    device_peak: int | None = None

    @property
    def rate(self) -> float:
        """GB/s, 1e9 bytes per second."""
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"read {self.nbytes / 1e9:.3f} GB in {self.seconds:.2f} s: {self.rate:.2f} GB/s"


class Checkpoint(Protocol):
    """An opened checkpoint: its metadata is read and checked, no weight is in memory yet."""

    path: Path
    weights_format: WeightsFormat
    #: config.json, or the metadata of a GGUF file.
    metadata: Mapping[str, Any]
    #: Filled by ``load``.
    report: LoadReport

    @property
    def spec_match(self) -> SpecMatch:
        """How to find the spec of this checkpoint."""
        ...

    def bind(self, spec: Spec) -> BoundModel:
        """Sizes and layer sets of ``spec`` as this checkpoint states them; CheckpointError on a contradiction."""
        ...

    def load(
        self,
        graph: Graph,
        model: BoundModel,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        *,
        keep_fp32: bool = False,
    ) -> dict[str, torch.Tensor | Nvfp4]:
        """Every weight value of ``graph`` by name, of the type the graph gives it, on ``device``.

        Streams slice by slice: besides the result, memory holds the slices that are being read and unpacked (see
        ``reading.py``). ``keep_fp32`` (for FP32 numerics) keeps a BF16 weight that is stored in FP32 as it is.
        CheckpointError where a tensor is missing, unknown, damaged or of the wrong shape.
        """
        ...

    def stream(
        self,
        graph: Graph,
        model: BoundModel,
        device: torch.device | str = "cpu",
        *,
        keep_fp32: bool = False,
        observer: Observer | None = None,
    ) -> Iterator[tuple[str, torch.Tensor | Nvfp4]]:
        """What ``load`` returns, weight by weight; the report is complete at the end.

        Files are read ahead by other threads, which tell ``observer`` the hash of every slice; packed weights are
        repacked on ``device``.
        """
        ...

    @property
    def files(self) -> Sequence[DataFile]:
        """The files that hold its tensors."""
        ...

    def find(self, graph: Graph, model: BoundModel) -> list[StoredWeight]:
        """Every weight of ``graph`` and the stored tensors it is made of; CheckpointError as for ``load``."""
        ...

    def extents(self, weight: StoredWeight) -> list[Extent]:
        """Where the tensors of a weight lie, companions included, in the order in which they are read."""
        ...


def open_checkpoint(path: str | Path, config: str | Path | None = None) -> Checkpoint:
    """Open a folder of safetensors, or a ``.gguf`` file.

    config: folder (or file) with the config.json to use instead of the one beside the weights.
    Raises CheckpointError where the path is neither, or its metadata is missing or damaged.
    """
    path = Path(path)
    config = None if config is None else Path(config)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder", remedy="pass a folder of safetensors or a .gguf file")
    if path.is_dir():
        from flintc.checkpoint.safetensors import open_safetensors

        return open_safetensors(path, config)
    if path.suffix == ".gguf":
        from flintc.checkpoint.gguf_checkpoint import open_gguf

        return open_gguf(path, config)
    raise CheckpointError(
        f"{path}: not a checkpoint",
        remedy="pass the folder that holds config.json and the .safetensors files, or a .gguf file",
    )
