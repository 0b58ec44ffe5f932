"""The bounded scan: what package gguf writes is read the same; every lie in a header is one error, fast and small."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_bytes import ARRAY, BOOL, I32, STRING, U8, U32, U64, Gguf, array, entry, tensor, text, u32, u64

from flintc.checkpoint.gguf_scan import MAX_HEADER, MAX_VALUES, GgufFile
from flintc.errors import CheckpointError

HUGE = 1 << 62


def write(folder: Path, file: Gguf | bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(bytes(file))
    return path


def read(file: GgufFile, name: str) -> bytes:
    extent = file.extent(name)
    data = torch.empty(extent.nbytes, dtype=torch.uint8)
    file.data.read_into(data, extent.offset, name)
    return data.numpy().tobytes()


@pytest.fixture
def written_by_gguf(tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    writer = gguf.GGUFWriter(path, "flint")
    writer.add_uint32("flint.block_count", 49)
    writer.add_int64("a.negative", -5)
    writer.add_float32("a.float", 0.1)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "schön 中")
    writer.add_array("a.flags", [True, False, True])
    writer.add_array("a.words", ["", "a", "Ġthe", "\n"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.25])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("scale", np.float32([2.5]))
    writer.add_tensor(
        "nvfp4",
        rng.integers(0, 127, (2, 3, 72), dtype=np.uint8),
        raw_dtype=gguf.GGMLQuantizationType.NVFP4,
    )
    writer.add_tensor("bf16", rng.integers(0, 127, (4, 6), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("q8", rng.integers(0, 127, (1, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_package_gguf_writes(written_by_gguf: Path) -> None:
    reader = gguf.GGUFReader(written_by_gguf)
    file = GgufFile(written_by_gguf)
    expected = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(file.metadata) == expected
    assert [type(v) for v in file.metadata.values()] == [type(v) for v in expected.values()]
    assert list(file.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.type.name, ours.offset, ours.nbytes) == (
            theirs.tensor_type.name,
            theirs.data_offset,
            theirs.n_bytes,
        )
        assert read(file, theirs.name) == theirs.data.tobytes()


def test_a_file_cut_short_after_the_scan_is_an_error(written_by_gguf: Path) -> None:
    file = GgufFile(written_by_gguf)
    os.truncate(written_by_gguf, file.tensors["q8"].offset + 3)
    with pytest.raises(CheckpointError, match="ends within q8"):
        read(file, "q8")


def test_every_truncation_is_an_error(written_by_gguf: Path, tmp_path: Path) -> None:
    whole = written_by_gguf.read_bytes()
    last = GgufFile(written_by_gguf).tensors["q8"]
    for length in range(last.offset + last.nbytes):
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            GgufFile(write(tmp_path, whole[:length]))


ONE = {"tensors": [tensor("t", [8], 0, 0)], "data": bytes(32)}
KEY = entry("k", U32, u32(1))

LIES: dict[str, tuple[Gguf | bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "version 2": (Gguf(version=2), "version 2"),
    "big-endian": (Gguf(version=3 << 24), "big-endian"),
    "tensor count": (Gguf(tensor_count=HUGE), "tensor count is .* more than the file can hold"),
    "tensor count one more": (Gguf(**ONE, tensor_count=2), r"^.*x\.gguf: .*"),
    "metadata count": (Gguf(entry_count=HUGE), "metadata count is .* more than"),
    "metadata count one more": (Gguf([KEY], entry_count=2), "a metadata key is empty"),
    "key length": (Gguf([u64(HUGE) + bytes(50)]), "a metadata key claims"),
    "key length past the end": (Gguf([u64(100) + bytes(50)]), "ends within a metadata key"),
    "key not UTF-8": (Gguf([entry(b"\xff\xfe", U32, u32(1))]), "a metadata key is not UTF-8"),
    "key empty": (Gguf([entry("", U32, u32(1))]), "a metadata key is empty"),
    "key not printable": (Gguf([entry("a\nb", U32, u32(1))]), "a metadata key is not printable"),
    "tensor name not printable": (Gguf(tensors=[tensor("a\x1b[2J", [1], 0, 0)], data=bytes(64)), "is not printable"),
    "tensor name too long": (Gguf(tensors=[tensor("a" * 257, [1], 0, 0)], data=bytes(64)), "claims 257 bytes"),
    "key twice": (Gguf([KEY, KEY]), "'k' appears twice"),
    "value type": (Gguf([entry("k", 77, u32(1))]), "'k' has unknown type 77"),
    "value cut": (Gguf([text("k"), u32(U64), b"\0"], entry_count=1, alignment=1), "ends within 'k'"),
    "bool of 2": (Gguf([entry("k", BOOL, b"\2")]), "byte other than 0 and 1"),
    "bools of 2": (Gguf([entry("k", ARRAY, array(BOOL, [b"\1", b"\2"]))]), "byte other than 0 and 1"),
    "string length": (Gguf([entry("k", STRING, u64(HUGE))]), "'k' claims"),
    "string not UTF-8": (Gguf([entry("k", STRING, text(b"\xc3"))]), "'k' is not UTF-8"),
    "array length": (Gguf([entry("k", ARRAY, array(U8, [], HUGE))]), "length of 'k' is .* more than the file"),
    "array of strings length": (
        Gguf([entry("k", ARRAY, array(STRING, [], HUGE))]),
        "length of 'k' is .* more than the file",
    ),
    "string in array length": (
        Gguf([entry("k", ARRAY, array(STRING, [text("ab"), u64(HUGE)]))]),
        r"'k'\[1\] claims",
    ),
    "string in array not UTF-8": (Gguf([entry("k", ARRAY, array(STRING, [text(b"\xff")]))]), r"'k'\[0\] is not"),
    "strings cut": (
        Gguf([text("k"), u32(ARRAY), array(STRING, [text("x" * 20)], 2)], entry_count=1, alignment=1),
        r"ends within 'k'\[1\]",
    ),
    "array of arrays": (Gguf([entry("k", ARRAY, array(ARRAY, [array(U8, [b"\0"])]))]), "array of arrays"),
    "array type": (Gguf([entry("k", ARRAY, array(13, [bytes(8)]))]), "unknown type 13"),
    "alignment zero": (Gguf([entry("general.alignment", U32, u32(0))]), "general.alignment is 0"),
    "alignment odd": (Gguf([entry("general.alignment", U32, u32(48))]), "general.alignment is 48"),
    "alignment huge": (Gguf([entry("general.alignment", U32, u32(1 << 30))]), "general.alignment is 1073741824"),
    "alignment text": (Gguf([entry("general.alignment", STRING, text("32"))]), "general.alignment is '32'"),
    "alignment negative": (Gguf([entry("general.alignment", I32, struct.pack("<i", -32))]), "alignment is -32"),
    "tensor twice": (Gguf(tensors=[tensor("t", [1], 0, 0), tensor("t", [1], 0, 32)], data=bytes(64)), "appears twice"),
    "tensor name empty": (Gguf(tensors=[tensor("", [1], 0, 0)], data=bytes(64)), "a tensor name is empty"),
    "tensor name not UTF-8": (Gguf(tensors=[tensor(b"\xff", [1], 0, 0)], data=bytes(64)), "name is not UTF-8"),
    "rank 0": (Gguf(tensors=[tensor("t", [], 0, 0)], data=bytes(64)), "0 dimensions"),
    "rank 5": (Gguf(tensors=[tensor("t", [1] * 5, 0, 0)], data=bytes(64)), "5 dimensions"),
    "rank huge": (Gguf(tensors=[tensor("t", [1], 0, 0, rank=1 << 31)], data=bytes(64)), "2147483648 dimensions"),
    "dimension 0": (Gguf(tensors=[tensor("t", [4, 0], 0, 0)], data=bytes(64)), "cannot hold"),
    "dimensions overflow": (Gguf(tensors=[tensor("t", [1 << 63, 1 << 63], 0, 0)], data=bytes(64)), "cannot hold"),
    "dimensions wrap": (Gguf(tensors=[tensor("t", [1 << 32, 1 << 32], 0, 0)], data=bytes(64)), "cannot hold"),
    "type unknown": (Gguf(tensors=[tensor("t", [8], 999, 0)], data=bytes(64)), "t has unknown type 999"),
    "type removed": (Gguf(tensors=[tensor("t", [8], 4, 0)], data=bytes(64)), "t has unknown type 4"),
    "ragged rows": (Gguf(tensors=[tensor("t", [48, 4], 40, 0)], data=bytes(400)), "no whole blocks of NVFP4"),
    "offset unaligned": (Gguf(tensors=[tensor("t", [1], 0, 8)], data=bytes(64)), "not aligned to 32"),
    "offset past the end": (Gguf(tensors=[tensor("t", [1], 0, 64)], data=bytes(64)), "reaches past the end"),
    "offset huge": (Gguf(tensors=[tensor("t", [1], 0, (1 << 64) - 32)], data=bytes(64)), "reaches past the end"),
    "data cut": (Gguf(tensors=[tensor("t", [8], 0, 0)], data=bytes(31)), "reaches past the end"),
    "overlap": (
        Gguf(tensors=[tensor("a", [9], 0, 0), tensor("b", [8], 0, 32)], data=bytes(64)),
        "b .* overlaps a",
    ),
    "same place": (Gguf(tensors=[tensor("a", [1], 0, 0), tensor("b", [1], 0, 0)], data=bytes(64)), "overlaps"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie: str, tmp_path: Path) -> None:
    file, message = LIES[lie]
    path = write(tmp_path, file)
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value) and caught.value.remedy and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def sparse(folder: Path, header: bytes, size: int) -> Path:
    path = write(folder, header)
    os.truncate(path, size)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (Gguf(tensor_count=1 << 30).header(), "more than the 262144 that are read"),
        (Gguf(entry_count=1 << 30).header(), "more than the 65536 that are read"),
        (Gguf([entry("k", ARRAY, array(U8, [], 1 << 34))]).header(), "more than the 4194304 that are read"),
        (Gguf([entry("k", ARRAY, array(STRING, [], MAX_VALUES + 1))]).header(), "more than the 4194304 that"),
        (
            Gguf(
                [entry(k, ARRAY, array(U8, [bytes(MAX_VALUES // 2 + 1)], MAX_VALUES // 2 + 1)) for k in "ab"]
            ).header(),
            "length of 'b' is 2097153, more than the 2097151 that are read",
        ),
        (Gguf([entry("k", STRING, u64(1 << 33))]).header(), "claims 8589934592 bytes"),
        (Gguf([entry("k", STRING, u64(MAX_HEADER))]).header(), "past the 64 MiB"),
    ],
)
def test_a_large_file_does_not_make_a_lie_plausible(header: bytes, message: str, tmp_path: Path) -> None:
    path = sparse(tmp_path, header, 40 << 30)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 5 and peak < 4 * MAX_HEADER


def test_the_longest_array_is_read_in_bounded_time(tmp_path: Path) -> None:
    path = write(tmp_path, Gguf([entry("k", ARRAY, u32(STRING) + u64(MAX_VALUES) + bytes(8 * MAX_VALUES))]))
    start = time.perf_counter()
    file = GgufFile(path)
    assert len(file.metadata["k"]) == MAX_VALUES
    assert time.perf_counter() - start < 20


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            GgufFile(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        GgufFile(tmp_path / "absent.gguf")
