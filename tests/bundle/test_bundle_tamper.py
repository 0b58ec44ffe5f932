"""A bundle that was altered in any way is refused, and loading one runs and follows nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundles import ORIGIN, make_bundle, make_compiled, make_plan

from flintc.bundle import build_bundle, folder, load_bundle, write_bundle
from flintc.bundle.manifest import FileRecord, _digest, _text
from flintc.errors import BundleError

FILES = [
    "manifest.json",
    "plan.json",
    "kernels/add.py",
    "kernels/add.sm_90.cubin",
    "kernels/add.sm_100.cubin",
    "kernels/add.sm_90.ptx",
    "kernels/add.sm_100.ptx",
]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_bundle(make_bundle(), tmp_path / "out")
    return tmp_path / "out"


def rewrite_manifest(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter the manifest as someone would who also puts its hash right."""
    body = json.loads((out / "manifest.json").read_text())
    del body["sha256"]
    change(body)
    (out / "manifest.json").write_text(_text({**body, "sha256": _digest(body)}))


def relist(out: Path, name: str, data: bytes) -> None:
    """Put other bytes in a file and its hash in the manifest."""
    (out / name).write_bytes(data)
    record = FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    rewrite_manifest(out, lambda body: body["files"].update({name: record.model_dump()}))


def test_untouched_bundle_loads(out: Path) -> None:
    load_bundle(out)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit(out: Path, name: str) -> None:
    file = out / name
    whole = file.read_bytes()
    places = random.Random(0).sample(range(len(whole) * 8), 40)
    for bit in [0, len(whole) * 8 - 1, *places]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with pytest.raises(BundleError, match=re.escape(name)):
            load_bundle(out)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "empty", "append", "missing", "folder", "link", "pipe"])
def test_any_damaged_file(out: Path, name: str, damage: str) -> None:
    file = out / name
    whole = file.read_bytes()
    if damage in ("truncate", "empty", "append"):
        file.write_bytes({"truncate": whole[:-1], "empty": b"", "append": whole + b"\n"}[damage])
    else:
        file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "link":
        (out.parent / "same").write_bytes(whole)
        file.symlink_to(out.parent / "same")
    elif damage == "pipe":
        os.mkfifo(file)
    with pytest.raises(BundleError, match=re.escape(name)):
        load_bundle(out)


@pytest.mark.parametrize("extra", ["extra.txt", "kernels/other.py", "kernels/.hidden", "__pycache__/"])
def test_extra_file(out: Path, extra: str) -> None:
    if extra.endswith("/"):
        (out / extra).mkdir()
    else:
        (out / extra).write_text("")
    with pytest.raises(BundleError, match=re.escape(extra.rstrip("/")) + ".*not part of it"):
        load_bundle(out)


def test_linked_kernels_folder(out: Path) -> None:
    (out / "kernels").rename(out.parent / "kernels")
    (out / "kernels").symlink_to(out.parent / "kernels")
    with pytest.raises(BundleError, match="kernels"):
        load_bundle(out)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "kernels/../../secret", "kernels/sub/x", ""])
def test_listed_path_out_of_the_folder(out: Path, name: str) -> None:
    secret = out.parent / "secret"
    secret.write_bytes(b"")
    record = {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    rewrite_manifest(out, lambda body: body["files"].update({name: record}))
    with pytest.raises(BundleError, match="lacks"):
        load_bundle(out)


@pytest.mark.parametrize("schema", [0, 1, 4, 5, 7, "6", None, True, [6]])
def test_foreign_schema(out: Path, schema: object) -> None:
    rewrite_manifest(out, lambda body: body.update(schema_version=schema))
    with pytest.raises(BundleError, match=r"follows bundle schema .*, this flintc reads schema 6.*compile"):
        load_bundle(out)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "\x00", "[" * 100_000, '{"format": "other"}', "1e999", '{"schema_version": 1}']
)
def test_what_is_no_manifest(out: Path, text: str) -> None:
    (out / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match=r"manifest\.json is not a bundle's manifest"):
        load_bundle(out)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("weights", lambda m: m.update(weights="int3")),
        ("batches", lambda m: m.update(batches=[0])),
        ("targets", lambda m: m.update(targets=["../sm_90"])),
        ("spec_sha256", lambda m: m.update(spec_sha256="no hash")),
        ("kernels.0.name", lambda m: m["kernels"][0].update(name="../add")),
        ("kernels.0.shared_bytes", lambda m: m["kernels"][0].update(shared_bytes=-1)),
        ("kernels.0.num_warps", lambda m: m["kernels"][0].update(num_warps="4")),
        ("files.plan.json.bytes", lambda m: m["files"]["plan.json"].update(bytes=1.5)),
        ("extra", lambda m: m.update(extra=1)),
        ("versions", lambda m: m.pop("versions")),
    ],
)
def test_manifest_of_another_shape(out: Path, place: str, change: Callable[[dict[str, Any]], None]) -> None:
    rewrite_manifest(out, change)
    with pytest.raises(BundleError, match=re.escape(f"is not a valid manifest: {place}")):
        load_bundle(out)


def test_manifest_written_otherwise(out: Path) -> None:
    file = out / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    with pytest.raises(BundleError, match="not written as flintc writes it"):
        load_bundle(out)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"graph": 1}', "\ud800"])
def test_plan_of_another_shape(out: Path, text: str) -> None:
    relist(out, "plan.json", text.encode(errors="surrogatepass"))
    with pytest.raises(BundleError, match=r"plan\.json"):
        load_bundle(out)


def test_files_that_are_not_the_plans(out: Path) -> None:
    relist(out, "kernels/add.py", b"# other\n")
    with pytest.raises(BundleError, match="its files are not those of its plan"):
        load_bundle(out)


def test_kernel_the_manifest_leaves_out(out: Path) -> None:
    rewrite_manifest(out, lambda body: body["kernels"].pop())
    with pytest.raises(BundleError, match="name different kernels"):
        load_bundle(out)


def test_kernel_without_its_file(out: Path) -> None:
    (out / "kernels/add.sm_90.cubin").unlink()
    rewrite_manifest(out, lambda body: body["files"].pop("kernels/add.sm_90.cubin"))
    with pytest.raises(BundleError, match="a kernel without its files"):
        load_bundle(out)


def test_ptx_that_is_no_text(out: Path) -> None:
    relist(out, "kernels/add.sm_90.ptx", b"\xff\xfe")
    with pytest.raises(BundleError, match="contradicts itself"):
        load_bundle(out)


def test_huge_files_are_not_read(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of a terabyte, and many files that only together are too much."""
    with (out / "plan.json").open("r+b") as file:
        file.truncate(1 << 40)
    start = time.monotonic()
    with pytest.raises(BundleError, match="larger than any bundle's file"):
        load_bundle(out)
    assert time.monotonic() - start < 5

    write_bundle(make_bundle(), out)
    monkeypatch.setattr(folder, "MAX_TOTAL_BYTES", (out / "manifest.json").stat().st_size + 100)
    with pytest.raises(BundleError, match="larger than any bundle's file"):
        load_bundle(out)


def test_too_many_files_are_not_listed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MAX_FILES", 5)
    with pytest.raises(BundleError, match="more than 5 files"):
        load_bundle(out)


def test_loading_executes_no_source(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    plan = make_plan(f"import pathlib\npathlib.Path({str(trap)!r}).touch()\n")
    write_bundle(build_bundle(plan, make_compiled(plan), ORIGIN), tmp_path / "out")
    load_bundle(tmp_path / "out")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("nothing", "No such file or directory"),
        ("file", "Not a directory"),
        ("empty", "out/kernels: No such file or directory"),
        ("no kernels", "out/kernels: No such file or directory"),
    ],
)
def test_no_bundle_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str, why: str) -> None:
    """Also of a path that is relative, as one is typed."""
    monkeypatch.chdir(tmp_path)
    path = Path("out")
    if make == "file":
        path.write_text("")
    elif make == "empty":
        path.mkdir()
    elif make == "no kernels":
        path.mkdir()
        (path / "manifest.json").write_text("{}")
    with pytest.raises(BundleError) as caught:
        load_bundle(path)
    assert str(caught.value) == f"no bundle at out: {why} (flintc compile makes one)"
