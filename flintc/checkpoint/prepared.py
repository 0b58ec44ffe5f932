"""Prepared copies: the weights of a checkpoint as the graph has them, kept to be read in place of the checkpoint.

A copy is a folder of data: ``weights.safetensors`` and a manifest with the hash of every slice of it. Its name says
how it was made (the recipe) and what of (the content of the stored tensors). A copy that is not whole reads as none.
"""

from __future__ import annotations

import gc
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flintc.checkpoint.checkpoint import Checkpoint, Progress
from flintc.checkpoint.content import Memory, SliceHashes, digest, read_content
from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.modelopt import SCALE, SCALE_2, ModeloptCheckpoint
from flintc.checkpoint.reading import DAMAGED, Slice, cut, sha256
from flintc.checkpoint.safetensors_header import read_header
from flintc.checkpoint.safetensors_writer import DTYPES, PlannedTensor, file_header
from flintc.checkpoint.weights import Piece, StoredWeight, collect, weight_shape, weight_values
from flintc.errors import CheckpointError, FlintcWarning
from flintc.ir.graph import Graph, Value
from flintc.reference.nvfp4 import BLOCK, Nvfp4
from flintc.spec import BoundModel
from flintc.unfinished import unfinished

#: Version of what loading makes of stored tensors, and of these files. Raise it when codes, scales or roundings come
#: out otherwise than before: copies of other versions are then not found.
LAYOUT = 1
WEIGHTS, MANIFEST = "weights.safetensors", "manifest.json"

Weights = dict[str, Tensor | Nvfp4]


def load_prepared(
    checkpoint: Checkpoint,
    graph: Graph,
    model: BoundModel,
    root: Path,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Weights:
    """What ``checkpoint.load`` returns, bit for bit, from its prepared copy under ``root``; made where there is none.

    Every slice of a copy is checked as it is read. A damaged copy is made anew, and one that cannot be written is a
    FlintcWarning: losing a cache never loses the work. ``checkpoint.report`` says what was done. CheckpointError as
    for ``checkpoint.load``.
    """
    return _Preparation(checkpoint, graph, model, root).load(device, progress)


class _Preparation:
    def __init__(self, checkpoint: Checkpoint, graph: Graph, model: BoundModel, root: Path) -> None:
        self.checkpoint, self.graph, self.model, self.root = checkpoint, graph, model, root
        self.weights = checkpoint.find(graph, model)
        self.extents = [extent for weight in self.weights for extent in checkpoint.extents(weight)]
        self.recipe = _recipe(self.weights)
        self.memory = Memory(root / "known", checkpoint.files)

    def load(self, device: torch.device | str, progress: Progress | None) -> Weights:
        content = self.memory.recall()
        if content is None and any(self.root.glob(f"{self.recipe}-*")):
            # One of the copies may be of these files, moved or touched: cheaper to find out than to write it again.
            content = read_content(self.extents, progress)
            self.remember(content)
        damage: list[str] = []
        if content is not None and self.folder(content).is_dir():
            try:
                return self.read(self.folder(content), device, progress)
            except CheckpointError as error:
                damage = [f"the prepared copy was damaged, and made anew: {error.message}"]
            gc.collect()  # the weights that were read must be gone before others come
            shutil.rmtree(self.folder(content), ignore_errors=True)
        weights = self.make(device, progress)
        self.checkpoint.report.notes += damage
        return weights

    def folder(self, content: str) -> Path:
        return self.root / f"{self.recipe}-{content[:32]}"

    def read(self, folder: Path, device: torch.device | str, progress: Progress | None) -> Weights:
        """The weights of a copy; CheckpointError where anything of it is not as it was written."""
        copy = _Copy(folder, self.graph)
        stream = copy.stream(self.graph, self.model, device, observer=copy.check)
        weights = collect(stream, len(self.weights), progress)
        report = self.checkpoint.report = copy.report
        report.source, report.used = "prepared", [str(name) for name in copy.manifest["used"]]
        report.notes = [*map(str, copy.manifest["notes"]), f"weights from the prepared copy {folder}"]
        return weights

    def make(self, device: torch.device | str, progress: Progress | None) -> Weights:
        """The weights of the checkpoint, and on the way a copy of them."""
        hashes = SliceHashes()
        stream = self.checkpoint.stream(self.graph, self.model, device, observer=hashes)
        with ExitStack() as stack:
            writer, failure = self.begin(stack)
            weights = collect(self.kept(stream, writer), len(self.weights), progress)
            content = hashes.content(self.extents)
            if writer is not None:
                if writer.failure is None:
                    writer.finish(self.manifest(content), self.folder(content))
                failure = writer.failure
        if failure is not None:
            self.warn(failure)
        else:
            self.remember(content)
            self.checkpoint.report.notes.append(f"prepared copy kept as {self.folder(content)}")
        return weights

    def begin(self, stack: ExitStack) -> tuple[_Writer | None, str | None]:
        """A writer in a folder that is removed with ``stack`` unless it is renamed, or why there can be none."""
        planned = [tensor for weight in self.weights for tensor in _plan(weight.value)]
        nbytes = sum(tensor.nbytes for tensor in planned)
        try:
            folder = stack.enter_context(unfinished(self.root))
            free = shutil.disk_usage(folder).free
            if nbytes <= free:
                return stack.enter_context(_Writer(folder, planned)), None
        except OSError as error:
            return None, error.strerror or str(error)
        return None, f"its {nbytes / 1e9:.1f} GB do not fit the {free / 1e9:.1f} GB that are free there"

    def kept(
        self, stream: Iterator[tuple[str, Tensor | Nvfp4]], writer: _Writer | None
    ) -> Iterator[tuple[str, Tensor | Nvfp4]]:
        for name, weight in stream:
            if writer is not None:
                writer.add(weight)
            yield name, weight

    def manifest(self, content: str) -> dict[str, Any]:
        report = self.checkpoint.report
        files = [str(file.path) for file in self.checkpoint.files]
        made = {"layout": LAYOUT, "recipe": self.recipe, "content": content, "spec": self.model.spec.name}
        return {**made, "files": files, "used": report.used, "notes": report.notes}

    def remember(self, content: str) -> None:
        with suppress(OSError):
            self.memory.remember(content)

    def warn(self, reason: str) -> None:
        message = f"no prepared copy is kept in {self.root}: {reason}"
        self.checkpoint.report.notes.append(message)
        warnings.warn(message, FlintcWarning, stacklevel=2)


class _Copy(ModeloptCheckpoint):
    """A prepared copy: packed safetensors that are named as the graph names weights, with a tensor scale per row."""

    def __init__(self, folder: Path, graph: Graph) -> None:
        self.manifest = _read_manifest(folder / MANIFEST)
        super().__init__(folder, folder / MANIFEST, self.manifest, read_header(folder / WEIGHTS))
        found = {(t.name, t.kind, t.shape) for t in self.tensors.values()}
        planned = [tensor for value in weight_values(graph) for tensor in _plan(value)]
        if found != {(t.name, DTYPES[t.dtype][0], t.shape) for t in planned}:
            raise CheckpointError(f"{folder / WEIGHTS}: does not hold the tensors of the model", remedy=DAMAGED)

    def find(self, graph: Graph, model: BoundModel) -> list[StoredWeight]:
        """Each weight is one piece."""
        return [StoredWeight(value, (Piece(value.name, slice(None), None),)) for value in weight_values(graph)]

    def check(self, part: Slice, found: str) -> None:
        """CheckpointError where the hash of a slice is not the one that was written."""
        if self.manifest["sha256"].get(part.extent.name, {}).get(str(part.first)) != found:
            raise CheckpointError(f"{self.path / WEIGHTS}: {part} is not what was written", remedy=DAMAGED)


class _Writer:
    """Writes weights as they come, slice by slice. The first failure ends writing, not loading."""

    def __init__(self, folder: Path, planned: Sequence[PlannedTensor]) -> None:
        self.failure: str | None = None
        self._folder = folder
        self._planned = iter(planned)
        self._hashes: dict[str, dict[str, str]] = {}
        self._file = (folder / WEIGHTS).open("wb")
        self._file.write(file_header(planned))

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of what could not be flushed, after a failure
            self._file.close()

    def add(self, weight: Tensor | Nvfp4) -> None:
        """The next weight of the plan."""
        parts = [weight]
        if isinstance(weight, Nvfp4):
            assert not weight.ordered, "a copy keeps ModelOpt's order"
            parts = [weight.codes, weight.scales.view(torch.float8_e4m3fn), weight.row_scale()]
        for tensor in parts:
            planned = next(self._planned)
            assert isinstance(tensor, Tensor) and tensor.shape == planned.shape and tensor.dtype == planned.dtype
            hashes = self._hashes[planned.name] = {}
            for first, stop in cut(planned.shape, planned.nbytes):
                if self.failure is None:
                    hashes[str(first)] = self._write(tensor[first:stop])

    def _write(self, part: Tensor) -> str:
        data = part.contiguous().flatten().view(torch.uint8).cpu()
        try:
            self._file.write(data.numpy().data)
        except OSError as error:
            self.failure = error.strerror or str(error)
        return sha256(data)

    def finish(self, manifest: Mapping[str, Any], target: Path) -> None:
        """Write the manifest and give the folder its name, unless another process was faster."""
        try:
            self._file.flush()
            whole = {**manifest, "sha256": self._hashes}
            text = json.dumps({**whole, "digest": digest(whole)}, indent=1)
            (self._folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
            if not target.exists():
                self._folder.rename(target)
        except OSError as error:
            if not target.exists():
                self.failure = error.strerror or str(error)


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    written = manifest.pop("digest", None)
    if manifest.get("layout") != LAYOUT or written != digest(manifest):
        raise CheckpointError(f"{path}: is not what was written", remedy=DAMAGED)
    return manifest


def _recipe(weights: Sequence[StoredWeight]) -> str:
    """What is made of which stored tensors, and the version of how, in 16 letters."""
    made = [
        (w.value.name, str(w.value.type), [(p.tensor, p.rows.start, p.rows.stop, p.expert) for p in w.pieces])
        for w in weights
    ]
    return digest([LAYOUT, sorted(made)])[:16]


def _plan(value: Value) -> list[PlannedTensor]:
    """The tensors of a weight in a copy."""
    name, shape = value.name, weight_shape(value)
    if value.type.dtype != "nvfp4":
        return [PlannedTensor(name, torch.bfloat16 if value.type.dtype == "bf16" else torch.float32, shape)]
    *rows, columns = shape
    return [
        PlannedTensor(name, torch.uint8, (*rows, columns // 2)),
        PlannedTensor(f"{name}{SCALE}", torch.float8_e4m3fn, (*rows, columns // BLOCK)),
        PlannedTensor(f"{name}{SCALE_2}", torch.float32, tuple(rows)),
    ]
