"""Which .safetensors files make up a checkpoint folder, and which tensor lies in which."""

from __future__ import annotations

from pathlib import Path

from flintc.checkpoint.json_file import read_json
from flintc.checkpoint.reading import Extent
from flintc.checkpoint.safetensors_header import read_header
from flintc.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def scan_folder(folder: Path) -> dict[str, Extent]:
    """Every tensor of the checkpoint in ``folder`` by name.

    The folder holds model.safetensors, or shards listed in model.safetensors.index.json. CheckpointError where
    neither or both are there, a shard is missing or outside the folder, or index and shards disagree.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f"{folder}: no {SINGLE} and no {INDEX}", remedy="pass the folder that holds a model's weights"
            )
        return read_header(inside(folder, SINGLE))
    weight_map = _read_index(folder)
    if single.exists() and SINGLE not in weight_map.values():
        raise CheckpointError(f"{folder}: both {SINGLE} and {INDEX}", remedy="keep only one of the two checkpoints")
    return _scan_shards(folder, weight_map)


def inside(folder: Path, name: str) -> Path:
    """``folder / name``; CheckpointError where it is missing or leads out of the folder.

    Links may lead into the ``blobs`` beside a hub cache's ``snapshots``, which is how that cache stores files.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(f"{folder}: {name!r} is not the name of a file in it", remedy="repair the index")
    path = folder / name
    roots = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        roots.append((folder.absolute().parent.parent / "blobs").resolve())
    if not path.exists():
        raise CheckpointError(f"{path}: no such file", remedy="fetch the missing file")
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise CheckpointError(f"{path}: leads out of its folder to {path.resolve()}", remedy="copy the file instead")
    return path


def _read_index(folder: Path) -> dict[str, str]:
    path = inside(folder, INDEX)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names", remedy="fetch it again")
    return weight_map


def _scan_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, Extent]:
    tensors: dict[str, Extent] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(inside(folder, shard)).items():
            if name in tensors:
                other = tensors[name].file.path.name
                raise CheckpointError(f"{tensor.file.path}: tensor {name} is in {other} too", remedy="fetch both again")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.path.name != shard:
            raise CheckpointError(
                f"{folder / shard}: lacks tensor {name}, which {INDEX} places there",
                remedy="fetch the shards and the index from the same revision",
            )
    unlisted = sorted(tensors.keys() - weight_map.keys())
    if unlisted:
        raise CheckpointError(
            f"{tensors[unlisted[0]].file.path}: tensor {unlisted[0]} is not listed in {INDEX}",
            remedy="fetch the shards and the index from the same revision",
        )
    return tensors
