"""Small valid checkpoints of every form, and ways to damage them.

Mutant number i of a seed is always the same, so that any one can be made again alone.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from random_gguf import Flint
from transformers import FlintConfig

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.convert import convert
from flintc.checkpoint.synth import synth_safetensors
from flintc.runtime.demo_tokenizer import demo_metadata
from flintc.spec import spec_for

INTERESTING = (0, 1, 2, 0x7F, 0xFF, 1 << 15, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)
EXPERTS = 2


def tiny_config() -> FlintConfig:
    """One dense and one expert layer, one of each attention kind, a vocabulary that holds a tokenizer of bytes."""
    return FlintConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=5,
        num_experts=EXPERTS,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[0],
        layer_types=["full_attention", "sliding_attention"],
    )


def make_bases(folder: Path) -> dict[str, Path]:
    """A GGUF file, a sharded BF16 folder and a sharded ModelOpt folder of one architecture."""
    flint = Flint(0, config=tiny_config())
    flint.metadata |= demo_metadata(272)
    flint.write(folder / "base.gguf")
    model = open_checkpoint(folder / "base.gguf").bind(spec_for(gguf="flint"))
    synth_safetensors(model, folder / "bf16", shard_bytes=60_000)
    convert(folder / "base.gguf", folder / "modelopt", "safetensors", shard_bytes=40_000)
    return {"gguf": folder / "base.gguf", "bf16": folder / "bf16", "modelopt": folder / "modelopt"}


@dataclass(frozen=True)
class Mutant:
    """A damaged checkpoint: where it lies, of which form it is, and which part was hit."""

    path: Path
    form: str
    part: str


#: Share of each part among the mutants of a form; `data` and `cut` are not of the structure.
GGUF_PARTS = {"header": 10, "metadata": 35, "directory": 35, "data": 12, "cut": 8}
FOLDER_PARTS = {"length": 6, "header": 38, "index": 16, "config": 15, "files": 5, "data": 12, "cut": 8}
STRUCTURAL = ("header", "metadata", "directory", "length", "index", "config", "files")


class Mutator:
    """Makes mutants of the bases in ``folder`` under ``work``, one at a time: the next replaces the last."""

    def __init__(self, folder: Path, work: Path, seed: int) -> None:
        self.bases = make_bases(folder)
        self.work, self.seed = work, seed
        self.data = self.bases["gguf"].read_bytes()
        self.bounds = _gguf_bounds(self.bases["gguf"])

    def make(self, number: int) -> Mutant:
        rng = random.Random(f"{self.seed}:{number}")
        form = rng.choices(("gguf", "bf16", "modelopt"), (6, 2, 2))[0]
        parts = GGUF_PARTS if form == "gguf" else FOLDER_PARTS
        part = rng.choices(list(parts), list(parts.values()))[0]
        if form == "gguf":
            path = self.work / "mutant.gguf"
            path.write_bytes(self._gguf(rng, part))
        else:
            path = self.work / "mutant"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self.bases[form], path)
            _damage_folder(path, part, rng)
        return Mutant(path, form, part)

    def _gguf(self, rng: random.Random, part: str) -> bytes:
        if part == "cut":
            return self.data[: rng.randrange(len(self.data))]
        return damage(self.data, *self.bounds[part], rng)


def _gguf_bounds(path: Path) -> dict[str, tuple[int, int]]:
    """Where header, metadata, directory and data of a GGUF file lie, by package gguf."""
    import gguf

    reader = gguf.GGUFReader(path)
    directory = reader.tensors[0].field.offset
    return {
        "header": (0, 24),
        "metadata": (24, directory),
        "directory": (directory, reader.data_offset),
        "data": (reader.data_offset, path.stat().st_size),
    }


def damage(data: bytes, first: int, last: int, rng: random.Random) -> bytes:
    """``data`` with one to three changes between ``first`` and ``last``."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        last = min(last, len(data))
        data = rng.choice(BYTE_CHANGES)(data, rng.randrange(first, max(last, first + 1)), rng)
    return data


def _flip(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data + b"\0"


def _replace(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + rng.randbytes(rng.choice((1, 2, 4, 8))) + data[at + 1 :]


def _number(data: bytes, at: int, rng: random.Random) -> bytes:
    """An interesting 32 or 64-bit number, or one near what is there."""
    form, size = rng.choice((("<I", 4), ("<Q", 8)))
    there = int.from_bytes(data[at : at + size], "little")
    value = rng.choice((rng.choice(INTERESTING), there + rng.choice((-1, 1, 32, -32)), there * 2, len(data)))
    return data[:at] + struct.pack(form, value % (1 << 8 * size)) + data[at + size :]


def _remove(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + data[at + rng.choice((1, 4, 8, 40)) :]


def _repeat(data: bytes, at: int, rng: random.Random) -> bytes:
    length = rng.choice((1, 4, 8, 40))
    return data[: at + length] + data[at:]


def _exchange(data: bytes, at: int, rng: random.Random) -> bytes:
    length = rng.choice((4, 8, 16))
    return data[:at] + data[at + length : at + 2 * length] + data[at : at + length] + data[at + 2 * length :]


BYTE_CHANGES: tuple[Callable[[bytes, int, random.Random], bytes], ...] = (
    *(_flip, _flip, _replace, _number, _number, _number),
    *(_remove, _repeat, _exchange),
)


def _damage_folder(folder: Path, part: str, rng: random.Random) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    shard = rng.choice(shards)
    if part == "index":
        _damage_json(folder / "model.safetensors.index.json", rng)
    elif part == "config":
        _damage_json(folder / "config.json", rng)
    elif part == "files":
        rng.choice(FILE_CHANGES)(folder, rng.choice(sorted(folder.iterdir())), rng)
    else:
        _damage_shard(shard, part, rng)


def _damage_shard(shard: Path, part: str, rng: random.Random) -> None:
    data = shard.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    if part == "cut":
        shard.write_bytes(data[: rng.randrange(len(data))])
    elif part == "length":
        shard.write_bytes(damage(data, 0, 8, rng))
    elif part == "data":
        shard.write_bytes(damage(data, 8 + length, len(data), rng))
    elif rng.random() < 0.4:
        shard.write_bytes(damage(data, 8, 8 + length, rng))
    else:  # legal JSON that lies, with the length that fits it
        header = json.dumps(_changed(json.loads(data[8 : 8 + length]), rng)).encode()
        shard.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def _damage_json(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    if rng.random() < 0.4:
        path.write_bytes(damage(data, 0, len(data), rng))
    else:
        path.write_text(json.dumps(_changed(json.loads(data), rng)))


VALUES = (None, True, -1, 0, 1, 2, 1 << 40, 1 << 63, 1 << 70, 0.5, 1e400, "", "x", "BF16", "F32", "U8", "F8_E4M3")
PATHS = ("../secret", "/etc/passwd", ".", "model-00001-of-00002.safetensors", "config.json", "\0", "a/../b")


def _changed(value: object, rng: random.Random) -> object:
    """``value`` with one change at a random depth."""
    children = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    if not children or rng.random() < 0.1:
        near = [value - 1, value + 1, value * 2, -value] if type(value) is int else []
        return rng.choice([*near, *near, *VALUES, *PATHS, [], {}, [value], {"x": value}])
    key = rng.choice(children)
    kind = rng.random()
    copy = dict(value) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    if kind < 0.15:
        del copy[key]
    elif kind < 0.25 and isinstance(copy, dict):
        copy[rng.choice((f"{key}x", rng.choice(children), "a" * 300))] = copy.pop(key)
    elif kind < 0.35:
        copy[key] = copy[rng.choice(children)]
    else:
        copy[key] = _changed(copy[key], rng)
    return copy


def _delete(folder: Path, file: Path, rng: random.Random) -> None:
    file.unlink()


def _empty(folder: Path, file: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def _folder_instead(folder: Path, file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _pipe_instead(folder: Path, file: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _link_outside(folder: Path, file: Path, rng: random.Random) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside)


def _link_to_itself(folder: Path, file: Path, rng: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _copy_over(folder: Path, file: Path, rng: random.Random) -> None:
    shutil.copyfile(rng.choice([p for p in sorted(folder.iterdir()) if p != file]), file)


FILE_CHANGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    *(_delete, _empty, _folder_instead, _pipe_instead, _link_outside, _link_to_itself, _copy_over),
)
