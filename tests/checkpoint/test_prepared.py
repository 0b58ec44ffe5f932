"""Prepared copies: equal weights, found by content, checked as they are read, whole or not there."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mutants import make_bases
from safetensors.torch import load_file
from torch import Tensor

from flintc.checkpoint import Checkpoint, content, open_checkpoint, prepared
from flintc.checkpoint.prepared import LAYOUT, load_prepared
from flintc.checkpoint.reading import DataFile
from flintc.errors import CheckpointError, FlintcWarning
from flintc.ir.build import build
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import spec_for

Weights = dict[str, Tensor | Nvfp4]
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(autouse=True)
def files_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these tests are younger than what is remembered."""
    monkeypatch.setattr(content, "SETTLED_NS", -1)


@pytest.fixture
def gguf(bases: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(bases["gguf"], tmp_path / "x.gguf"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "copies"


def load(path: Path, root: Path | None, progress: Callable[[int, int, str], None] | None = None) -> Checkpoint:
    """The opened checkpoint, with its weights under ``weights``."""
    checkpoint = open_checkpoint(path)
    match = checkpoint.spec_match
    model = checkpoint.bind(spec_for(match.architecture, match.gguf))
    graph = build(model, checkpoint.weights_format)
    if root is None:
        checkpoint.weights = checkpoint.load(graph, model)  # type: ignore[attr-defined]
    else:
        checkpoint.weights = load_prepared(checkpoint, graph, model, root, progress=progress)  # type: ignore[attr-defined]
    return checkpoint


def parts(weight: Tensor | Nvfp4) -> list[Tensor]:
    return [weight.codes, weight.scales, weight.scale] if isinstance(weight, Nvfp4) else [weight]


def same(a: Checkpoint, b: Checkpoint) -> bool:
    """Bit for bit, in types, shapes and order too."""
    ours, theirs = (c.weights for c in (a, b))  # type: ignore[attr-defined]
    return list(ours) == list(theirs) and all(
        x.dtype == y.dtype and torch.equal(x, y)
        for name in ours
        for x, y in zip(parts(ours[name]), parts(theirs[name]), strict=True)
    )


def copies(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.name != "known")


def read_by(load_again: Callable[[], Checkpoint], monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoint, set[str]]:
    """What is loaded, and the names of the files whose tensors were read."""
    read, names = DataFile.read_into, set()

    def watched(self: DataFile, *given: object) -> None:
        names.add(self.path.name)
        read(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(DataFile, "read_into", watched)
        return load_again(), names


@pytest.mark.parametrize("form", ["gguf", "bf16", "modelopt"])
def test_a_copy_is_made_and_then_read_instead(
    form: str, bases: dict[str, Path], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bases[form]
    plain, first = load(path, None), load(path, root)
    assert first.report.source == "checkpoint" and same(first, plain)
    (folder,) = copies(root)
    assert f"prepared copy kept as {folder}" in first.report.notes
    second, read = read_by(lambda: load(path, root), monkeypatch)
    assert read == {"weights.safetensors"}
    assert second.report.source == "prepared" and same(second, plain)
    assert second.report.used == plain.report.used
    assert set(second.report.notes) >= set(plain.report.notes)
    assert second.report.nbytes == sum(t.nbytes for t in load_file(folder / "weights.safetensors").values())
    assert copies(root) == [folder]


def test_it_is_plain_data_under_the_graphs_names(gguf: Path, root: Path) -> None:
    weights = load(gguf, root).weights  # type: ignore[attr-defined]
    (folder,) = copies(root)
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "weights.safetensors"]
    stored = load_file(folder / "weights.safetensors")
    for name, weight in weights.items():
        if isinstance(weight, Nvfp4):
            assert torch.equal(stored[name], weight.codes)
            assert torch.equal(stored[f"{name}_scale"].view(torch.uint8), weight.scales)
            assert torch.equal(stored[f"{name}_scale_2"], weight.row_scale())
        else:
            assert torch.equal(stored[name], weight)


#: Of the trained example's copy, for each LAYOUT so far.
EXAMPLES_HASH = {1: "56d5182c7bc24bdb303a9f3cefb7f673ad056ceab3b1c540029e2e7b915d3da7"}


def test_who_changes_the_layout_must_raise_its_version(root: Path) -> None:
    load(EXAMPLE / "tiny-flint.gguf", root)
    (folder,) = copies(root)
    assert content.digest(json.loads((folder / "manifest.json").read_text())["sha256"]) == EXAMPLES_HASH[LAYOUT]


def test_copies_of_other_versions_are_not_found(gguf: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(gguf, root)
    monkeypatch.setattr(prepared, "LAYOUT", LAYOUT + 1)
    assert load(gguf, root).report.source == "checkpoint"
    assert len(copies(root)) == 2
    assert load(gguf, root).report.source == "prepared"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 1.0])
def test_a_flipped_bit_anywhere_is_noticed_and_repaired(name: str, share: float, gguf: Path, root: Path) -> None:
    plain = load(gguf, None)
    load(gguf, root)
    (folder,) = copies(root)
    file = folder / name
    flip(file, int(share * (file.stat().st_size - 2)))
    again = load(gguf, root)
    assert again.report.source == "checkpoint" and same(again, plain)
    assert any(str(folder) in note and "damaged, and made anew" in note for note in again.report.notes)
    assert load(gguf, root).report.source == "prepared"


def test_whatever_is_damaged_no_weight_is_another(gguf: Path, root: Path) -> None:
    plain = load(gguf, None)
    load(gguf, root)
    (folder,) = copies(root)
    chance = random.Random(5)
    for _ in range(40):
        for _ in range(chance.choice([1, 1, 3])):
            file = folder / chance.choice(["weights.safetensors", "manifest.json"])
            flip(file, chance.randrange(file.stat().st_size))
        assert same(load(gguf, root), plain)


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1000)


@pytest.mark.parametrize("damage", [Path.unlink, cut_short, lambda file: file.write_text("{}")])
@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_a_copy_that_is_not_whole_is_made_anew(
    name: str, damage: Callable[[Path], object], gguf: Path, root: Path
) -> None:
    load(gguf, root)
    (folder,) = copies(root)
    damage(folder / name)
    assert same(load(gguf, root), load(gguf, None))
    assert load(gguf, root).report.source == "prepared"


def test_a_file_whose_content_changed_is_another_one(gguf: Path, root: Path) -> None:
    """Even if its size and its time of modification are what they were."""
    load(gguf, root)
    before = gguf.stat()
    flip(gguf, before.st_size - 1000)
    os.utime(gguf, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert gguf.stat().st_mtime_ns == before.st_mtime_ns and gguf.stat().st_size == before.st_size
    changed = load(gguf, root)
    assert changed.report.source == "checkpoint" and same(changed, load(gguf, None))
    assert len(copies(root)) == 2
    assert same(load(gguf, root), changed)


def test_the_same_content_elsewhere_is_found_after_one_look(
    gguf: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(gguf, root)
    moved = Path(shutil.copy(gguf, gguf.with_name("moved.gguf")))
    told: list[str] = []
    first, read = read_by(lambda: load(moved, root, lambda *at: told.append(at[2])), monkeypatch)
    assert first.report.source == "prepared" and read == {"moved.gguf", "weights.safetensors"}
    assert "hash of token_embd.weight" in told
    _, read = read_by(lambda: load(moved, root), monkeypatch)
    assert read == {"weights.safetensors"}
    assert len(copies(root)) == 1


def test_what_has_just_changed_is_not_trusted_to_stay(gguf: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "SETTLED_NS", 3600 * 10**9)
    load(gguf, root)
    again, read = read_by(lambda: load(gguf, root), monkeypatch)
    assert again.report.source == "prepared" and read == {"x.gguf", "weights.safetensors"}


def test_a_damaged_memory_is_no_memory(gguf: Path, root: Path) -> None:
    load(gguf, root)
    (known,) = (root / "known").iterdir()
    known.write_text("[")
    assert load(gguf, root).report.source == "prepared"
    assert json.loads(known.read_text())["content"]


def test_nothing_is_left_of_a_checkpoint_that_does_not_load(gguf: Path, root: Path) -> None:
    checkpoint = open_checkpoint(gguf)
    assert hasattr(checkpoint, "file")
    flip_at = checkpoint.file.tensors["blk.1.ffn_down_exps.weight"].offset
    with gguf.open("r+b") as file:
        file.seek(flip_at)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="a block scale is 0xFF"):
        load(gguf, root)
    assert list(root.iterdir()) == []


def test_nothing_is_left_of_an_interrupted_load(gguf: Path, root: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(gguf, root, stop)
    assert list(root.iterdir()) == []


@pytest.fixture
def no_space(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The disk is full after the first weights."""
    write = prepared._Writer._write
    count = iter(range(10**6))

    def failing(self: prepared._Writer, part: Tensor) -> str:
        if next(count) == 7:
            self._file.close()
            self._file = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115
        return write(self, part)

    monkeypatch.setattr(prepared._Writer, "_write", failing)
    yield


def small_disk(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 1000}))


def not_a_folder(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    root.write_text("a file")


@pytest.mark.parametrize(("hinder", "words"), [(small_disk, "do not fit"), (not_a_folder, "File exists")])
def test_where_none_can_be_kept_weights_load_all_the_same(
    hinder: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    gguf: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hinder(monkeypatch, root)
    with pytest.warns(FlintcWarning, match=f"no prepared copy is kept in .*{words}"):
        loaded = load(gguf, root)
    assert same(loaded, load(gguf, None))
    assert any("no prepared copy is kept in" in note and words in note for note in loaded.report.notes)
    assert root.is_file() or list(root.iterdir()) == []


def test_a_disk_that_fills_up_loses_the_copy_only(gguf: Path, root: Path, no_space: None) -> None:
    with pytest.warns(FlintcWarning, match="No space left on device"):
        loaded = load(gguf, root)
    assert same(loaded, load(gguf, None))
    assert list(root.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(gguf: Path, root: Path) -> None:
    program = "import sys; from pathlib import Path; from flintc.unfinished import unfinished\n"
    program += "with unfinished(Path(sys.argv[1])) as folder: print(folder, flush=True); input()"
    writers = [
        subprocess.Popen([sys.executable, "-c", program, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        dead, alive = (Path(os.fsdecode(w.stdout.readline().rstrip())) for w in writers if w.stdout is not None)
        (dead / "half").write_bytes(b"a copy")
        writers[0].kill()
        writers[0].wait()
        assert dead.is_dir() and alive.is_dir()
        load(gguf, root)
        assert alive.is_dir() and not dead.parent.exists()
    finally:
        for writer in writers:
            writer.communicate(b"\n")
    assert not alive.parent.exists()


def test_of_two_writers_the_second_gives_way(gguf: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = prepared._Writer.finish
    inner: list[Checkpoint] = []

    def with_another_meanwhile(self: prepared._Writer, manifest: dict[str, object], target: Path) -> None:
        monkeypatch.setattr(prepared._Writer, "finish", finish)
        inner.append(load(gguf, root))
        finish(self, manifest, target)

    monkeypatch.setattr(prepared._Writer, "finish", with_another_meanwhile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer = load(gguf, root)
    assert same(outer, inner[0]) and len(copies(root)) == 1
    assert load(gguf, root).report.source == "prepared"
