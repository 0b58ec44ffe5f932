"""Synthetic checkpoints: random weights in the published form, for models whose real weights are not at hand.

The weights are drawn by what they do, so that activations stay near one through all layers, attention and routing
have clear favourites, and the distribution of the next token is peaked.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

from flintc.checkpoint.checkpoint import Progress
from flintc.checkpoint.config_json import published_config
from flintc.checkpoint.safetensors_writer import PlannedTensor, write_shards
from flintc.checkpoint.weights import Shape, part_shapes, weight_forms, weight_shape, weight_values
from flintc.errors import UsageError
from flintc.ir.build import build
from flintc.ir.graph import Graph, Value
from flintc.ir.ops import OPS
from flintc.spec import BoundModel

SHARD_BYTES = 5_000_000_000
#: Entropy, in nats, that the next-token distribution of a synthetic model is drawn for.
ENTROPY = 2.0


@dataclass(frozen=True, slots=True)
class Draw:
    """A weight's distribution, normal with ``mean`` and ``deviation``, and the type it is published in."""

    mean: float
    deviation: float
    dtype: torch.dtype = torch.bfloat16

    def tensor(self, shape: Shape, seed: int, name: str) -> Tensor:
        """The values of tensor ``name``: the same for the same seed and name, whatever else is drawn."""
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.empty(shape).normal_(self.mean, self.deviation, generator=generator).to(self.dtype)


def weight_draw(graph: Graph, value: Value) -> Draw:
    """How to draw a weight of ``graph``, by the op that reads it and the port it enters by."""
    op = graph.ops[graph.consumers[value.name][0]]
    port = OPS[op.kind].inputs[op.inputs.index(value.name)]
    rows, columns = (1, *weight_shape(value))[-2:]
    if port == "sinks?":
        return Draw(2.0, 4.0, torch.float32)  # from far below the scores to above most of them
    if op.kind == "embed":
        return Draw(0.0, 1.0)
    if op.kind == "norm":
        return Draw(1.0, 0.1)
    if op.kind == "head_norm":
        return Draw(1.5, 0.3)  # scores spread by about 1.5 squared: attention has favourites
    if op.kind == "router":
        return Draw(0.0, 2 / math.sqrt(columns), torch.float32)
    if op.outputs[0] == graph.outputs[0]:
        # Normal logits of deviation s over n words have entropy log(n) - s^2 / 2.
        return Draw(0.0, math.sqrt(2 * max(math.log(rows) - ENTROPY, 1.0) / columns))
    return Draw(0.0, 1 / math.sqrt(columns))


def synth_safetensors(
    model: BoundModel,
    path: str | Path,
    seed: int = 0,
    *,
    shard_bytes: int = SHARD_BYTES,
    extras: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a folder with config.json and weights of ``model`` under their published names; returns its files.

    Memory holds one tensor at a time. ``extras`` may add files (a tokenizer) to the folder it is called with. The
    folder appears under its name when it is complete. UsageError where ``path`` exists or the disk is too small.
    """
    path = Path(path)
    graph = build(model)
    plan = [(weight_draw(graph, value), *stored) for value in weight_values(graph) for stored in _stored(model, value)]
    planned = [PlannedTensor(name, draw.dtype, shape) for draw, name, shape in plan]

    def tensors() -> Iterator[Tensor]:
        for done, (draw, name, shape) in enumerate(plan, 1):
            if progress is not None:
                progress(done, len(plan), name)
            yield draw.tensor(shape, seed, name)

    with new_folder(path, sum(t.nbytes for t in planned)) as folder:
        write_shards(folder, planned, tensors(), shard_bytes)
        config = json.dumps(published_config(model), indent=2, sort_keys=True)
        (folder / "config.json").write_text(config + "\n", encoding="utf-8")
        if extras is not None:
            extras(folder)
    return sorted(path.iterdir())


def _stored(model: BoundModel, value: Value) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each tensor of a weight in its first form."""
    for part, shapes in part_shapes(model, value, weight_forms(model, value, "safetensors")[0]):
        yield from zip(part.tensors, shapes, strict=True)


@contextmanager
def new_folder(path: Path, nbytes: int) -> Iterator[Path]:
    """A folder to fill, renamed to ``path`` at the end; on an error it is removed and ``path`` never appears.

    UsageError where ``path`` exists (an empty folder may), its parent cannot be written, or ``nbytes`` do not fit.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} exists already", remedy="name a new folder, or remove this one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}") from None
    try:
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise UsageError(f"{path}: {nbytes / 1e9:.1f} GB do not fit the {free / 1e9:.1f} GB that are free there")
        yield folder
        folder.chmod(0o755)
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
