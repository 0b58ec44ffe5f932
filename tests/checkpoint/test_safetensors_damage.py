"""Damaged, hostile and incomplete folders: always a CheckpointError that names the file, never anything else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.safetensors_folder import scan_folder
from flintc.checkpoint.safetensors_header import read_header
from flintc.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5).bfloat16()}


def packed(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[object], begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header does not fit"),
        (b"\x08\0\0", "header does not fit"),
        (packed({}, length=1 << 40), "header does not fit"),
        (packed({}, length=2**64 - 1), "header does not fit"),
        (packed(b"[]"), "JSON object"),
        (packed(b"{"), "not valid JSON"),
        (packed(b"\xff\xfe{}"), "not valid JSON"),
        (packed(b"[" * 200_000), "nested too deeply"),
        (packed(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
        (packed(b'{"a": 1, "a": 2}'), "'a' stands twice"),
        (packed({"__metadata__": ["format", "pt"]}), "__metadata__ of the header must map"),
        (packed({"__metadata__": {"format": 1}}), "__metadata__ of the header must map"),
        (packed({"a": 5}), "tensor a has a malformed"),
        (packed({"a": {}}), "tensor a has a malformed"),
        (packed({"a": entry([-1], 0, 4)}, bytes(4)), "tensor a has a malformed"),
        (packed({"a": entry([True], 0, 4)}, bytes(4)), "tensor a has a malformed"),
        (packed({"a": entry([1.0], 0, 4)}, bytes(4)), "tensor a has a malformed"),
        (packed({"a": entry([1 << 62, 1 << 62], 0, 4)}, bytes(4)), "tensor a has a malformed"),
        (packed({"a": entry([1], 0, 4, 7)}, bytes(4)), "tensor a has a malformed"),
        (packed({"a": {**entry([1], 0, 4), "data_offsets": [0]}}, bytes(4)), "tensor a has a malformed"),
        (packed({"a": entry([2], 0, 4)}, bytes(4)), "tensor a: F32[2] does not take bytes 0..4"),
        (packed({"a": entry([1], 4, 0)}, bytes(4)), "tensor a: F32[1] does not take bytes 4..0"),
        (packed({"a": entry([1], 0, 4)}), "0 bytes of data, its header describes 4"),
        (packed({"a": entry([1], 0, 4)}, bytes(9)), "9 bytes of data, its header describes 4"),
        (packed({"a": entry([1], 4, 8)}, bytes(8)), "tensor a leaves a hole"),
        (packed({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), "tensor b overlaps"),
    ],
)
def test_damaged_file(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        scan_folder(tmp_path)
    assert words in str(caught.value) and "model.safetensors" in str(caught.value)


def test_header_as_the_package_writes_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {n: (t.kind, t.shape) for n, t in found.items()} == {"a": ("F32", (2, 3)), "b": ("BF16", (5,))}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_damage(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cut the file anywhere or change any bytes: it reads as something, or the error is ours."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensor a in shard one, b in shard two."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, file in (("a", "one.safetensors"), ("b", "two.safetensors")):
        save_file({name: TENSORS[name]}, folder / file)
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index(weight_map: object) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, weight_map)


def outside(folder: Path) -> None:
    (folder / "two.safetensors").rename(folder.parent / "two.safetensors")


def linked_outside(folder: Path) -> None:
    outside(folder)
    (folder / "two.safetensors").symlink_to(folder.parent / "two.safetensors")


def to_parent(folder: Path) -> None:
    outside(folder)
    write_index(folder, {"a": "one.safetensors", "b": "../two.safetensors"})


def to_root(folder: Path) -> None:
    outside(folder)
    write_index(folder, {"a": "one.safetensors", "b": str(folder.parent / "two.safetensors")})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "two.safetensors").unlink(), ["two.safetensors: no such file"]),
        (lambda f: (f / "two.safetensors").write_bytes(b"x"), ["two.safetensors: the header"]),
        (lambda f: save_file(TENSORS, f / "model.safetensors"), ["both model.safetensors and"]),
        (lambda f: save_file(TENSORS, f / "two.safetensors"), ["tensor a is in one.safetensors too"]),
        (lambda f: save_file({"c": TENSORS["b"]}, f / "two.safetensors"), ["two.safetensors: lacks tensor b"]),
        (index({"a": "two.safetensors", "b": "one.safetensors"}), ["lacks tensor a"]),
        (index({"a": "one.safetensors"}), []),
        (index(["one.safetensors"]), ["weight_map must map"]),
        (index({"a": 1}), ["weight_map must map"]),
        (index({"a": "one.safetensors", "b": "."}), ["'.' is not the name of a file"]),
        (index({"a": "one.safetensors", "b": "\0"}), ["is not the name of a file"]),
        (to_parent, ["'../two.safetensors' is not the name of a file"]),
        (to_root, ["is not the name of a file"]),
        (linked_outside, ["two.safetensors: leads out of its folder"]),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), ["index.json: not valid JSON"]),
        (lambda f: (f / "model.safetensors.index.json").unlink(), ["no model.safetensors"]),
    ],
)
def test_damaged_folder(damage: Callable[[Path], None], words: list[str], sharded: Path) -> None:
    assert scan_folder(sharded).keys() == TENSORS.keys()
    damage(sharded)
    if not words:  # a file that the index does not name is no part of the checkpoint
        assert scan_folder(sharded).keys() == {"a"}
        return
    with pytest.raises(CheckpointError) as caught:
        scan_folder(sharded)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unlisted_tensor_of_a_listed_shard(sharded: Path) -> None:
    save_file({"b": TENSORS["b"], "c": TENSORS["a"]}, sharded / "two.safetensors")
    with pytest.raises(CheckpointError, match="tensor c is not listed"):
        scan_folder(sharded)


def test_links_of_a_hub_cache(sharded: Path, tmp_path: Path) -> None:
    """A hub cache keeps files under blobs/ and links them from snapshots/REVISION/."""
    (tmp_path / "models--x" / "blobs").mkdir(parents=True)
    snapshot = tmp_path / "models--x" / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        blob = tmp_path / "models--x" / "blobs" / str(number)
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert scan_folder(snapshot).keys() == TENSORS.keys()
    (snapshot / "two.safetensors").unlink()
    (snapshot / "two.safetensors").symlink_to(sharded / "two.safetensors")
    with pytest.raises(CheckpointError, match="leads out"):
        scan_folder(snapshot)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "config.json: no such file"),
        ("", "config.json: not valid JSON"),
        ("[1]", "config.json: expected a JSON object"),
        ('{"a": 1, "a": 2}', "config.json: not valid JSON: 'a' stands twice"),
        ("[" * 100_000, "config.json: nested too deeply"),
        ('{"vocab_size": 5}', "config.json: no `architectures`"),
        ('{"architectures": []}', "config.json: no `architectures`"),
        ('{"architectures": "FlintForCausalLM"}', "config.json: no `architectures`"),
    ],
)
def test_config(config: str | None, words: str, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(tmp_path).spec_match
    assert words in str(caught.value)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path, "config.json"),
        (Path(__file__), "not a checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)
