"""Tensor data in slices: what is cut, what is read ahead, what is hashed, and what is said of a file that changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from flintc import api
from flintc.checkpoint import open_checkpoint, reading
from flintc.checkpoint.reading import AHEAD, DataFile, Extent, Slice, SliceReader
from flintc.errors import CheckpointError
from flintc.ir.build import build
from flintc.spec import spec_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
DATA = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)


@pytest.fixture
def extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Extent]:
    """7 rows of 1000 bytes, a scalar of 4, and 299 experts of 10, read 2048 bytes at a time."""
    monkeypatch.setattr(reading, "SLICE_BYTES", 2048)
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    file = DataFile(path)
    shapes = {"rows": (7, 500), "scalar": (), "experts": (299, 5, 1)}
    result, at = [], 6
    for name, shape in shapes.items():
        nbytes = 4 if not shape else 2 * int(np.prod(shape))
        result.append(Extent(name, file, at, nbytes, "BF16", shape))
        at += nbytes
    return result


def test_slices_are_whole_units(extents: list[Extent]) -> None:
    cuts = {e.name: [(s.first, s.stop, s.nbytes) for s in e.slices()] for e in extents}
    assert cuts["rows"] == [(0, 2, 2000), (2, 4, 2000), (4, 6, 2000), (6, 7, 1000)]
    assert cuts["scalar"] == [(0, 1, 4)]
    assert cuts["experts"] == [(0, 204, 2040), (204, 299, 950)]


def test_a_unit_larger_than_a_slice_is_read_whole(extents: list[Extent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", 10)
    assert [s.nbytes for s in extents[0].slices()] == [1000] * 7


def test_data_and_hashes_of_every_slice(extents: list[Extent]) -> None:
    seen: dict[str, str] = {}
    with SliceReader(extents, observer=lambda part, digest: seen.update({str(part): digest})) as source:
        for extent in extents:
            got = torch.cat([data.flatten() for _, data in source.parts(extent)])
            assert got.numpy().tobytes() == DATA[extent.offset :][: extent.nbytes].tobytes()
    slices = [part for extent in extents for part in extent.slices()]
    expected = {str(p): hashlib.sha256(DATA[p.offset :][: p.nbytes].tobytes()).hexdigest() for p in slices}
    assert seen == expected
    assert source.nbytes == sum(extent.nbytes for extent in extents)


def test_reading_stays_a_fixed_number_of_slices_ahead(extents: list[Extent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SLICE_BYTES", 10)
    begun: list[Slice] = []
    with SliceReader(extents, observer=lambda part, _: begun.append(part)) as source:
        used = 0
        for extent in extents:
            for _ in source.parts(extent):
                used += 1
                assert len(begun) <= used + AHEAD
    assert used == 7 + 1 + 299


def test_what_an_observer_raises_is_raised_to_the_reader(extents: list[Extent]) -> None:
    def refuse(part: Slice, digest: str) -> None:
        if part.extent.name == "scalar":
            raise CheckpointError("no, a test")

    with SliceReader(extents, observer=refuse) as source:
        assert len(list(source.parts(extents[0]))) == 4
        with pytest.raises(CheckpointError, match=r"^no, a test$"):
            source.whole(extents[1])


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a crash, which reading through a memory map would be."""
    monkeypatch.setattr(reading, "SLICE_BYTES", 4096)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    checkpoint = open_checkpoint(tmp_path)
    model = checkpoint.bind(spec_for("FlintForCausalLM"))
    stream = checkpoint.stream(build(model), model)
    next(stream)
    os.truncate(tmp_path / "model.safetensors", 100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file ends within model\.layers"):
        list(stream)


@pytest.mark.parametrize("name", ["tiny-flint.gguf", "."])
def test_the_size_of_slices_changes_no_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights() -> dict[str, torch.Tensor]:
        checkpoint = open_checkpoint(EXAMPLE / name)
        match = checkpoint.spec_match
        model = checkpoint.bind(spec_for(match.architecture, match.gguf))
        loaded = checkpoint.load(build(model, checkpoint.weights_format), model)
        return {n: w if isinstance(w, torch.Tensor) else w.dequantize() for n, w in loaded.items()}

    whole = weights()
    monkeypatch.setattr(reading, "SLICE_BYTES", 1000)
    assert whole.keys() == (cut := weights()).keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_stream_of_weights_takes_the_memory_of_few(tmp_path: Path) -> None:
    """Where weights do not stay on the host, loading keeps to a part of the file's size, whatever that is."""
    file = tmp_path / "x.gguf"
    api.synth("tiny-flint", file, format="gguf", sizes={"experts": 2048})
    program = f"""
        from flintc.bench.memory import AnonymousPeak, anonymous_bytes
        from flintc.checkpoint import open_checkpoint, reading
        from flintc.ir.build import build
        from flintc.spec import spec_for
        reading.SLICE_BYTES = 1 << 20
        checkpoint = open_checkpoint({str(file)!r})
        model = checkpoint.bind(spec_for(gguf="flint"))
        graph = build(model, "nvfp4")
        before = anonymous_bytes()
        with AnonymousPeak() as peak:
            for name, weight in checkpoint.stream(graph, model):
                pass
        print(peak.nbytes - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert file.stat().st_size > 110e6
    assert int(done.stdout) < 90e6  # about 55e6: the largest weights have 19e6
