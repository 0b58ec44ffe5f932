"""Bundles in memory and on disk: round trip, reproducibility, atomic writing, targets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from bundles import ORIGIN, make_bundle, make_compiled, make_plan

from flintc.bundle import build_bundle, check_same_model, folder, load_bundle, write_bundle
from flintc.errors import BundleError, VerificationError
from flintc.ir.build import build
from flintc.ir.lower import lower_attention
from flintc.spec import bind_defaults, load_spec
from flintc.unfinished import unfinished


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_round_trip(tmp_path: Path) -> None:
    bundle = make_bundle()
    written = write_bundle(bundle, tmp_path / "out")
    loaded = load_bundle(tmp_path / "out")
    assert bundle.path is None
    assert written.path == loaded.path == tmp_path / "out"
    assert loaded.plan == bundle.plan
    assert loaded.manifest == bundle.manifest
    assert loaded.compiled == bundle.compiled
    assert loaded.cubin("add", "sm_100") == bundle.compiled["add", "sm_100"].cubin
    assert list(loaded.for_target("sm_90")) == ["add"]


def test_layout_and_manifest(tmp_path: Path) -> None:
    """Read back with nothing of flintc's: the names, and the hash and size of every file."""
    write_bundle(make_bundle(), tmp_path / "out")
    files = contents(tmp_path / "out")
    kernels = {f"kernels/add.{t}.{kind}" for t in ("sm_90", "sm_100") for kind in ("cubin", "ptx")}
    assert set(files) == {"manifest.json", "plan.json", "kernels/add.py"} | kernels
    manifest = json.loads(files["manifest.json"])
    listed = {name: (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
    del files["manifest.json"]
    assert listed == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    assert (manifest["spec"], manifest["spec_sha256"], manifest["weights"]) == ("tiny", "ab" * 32, "bf16")
    assert manifest["pipeline"] == ["residual-norm", "dependent-launch"]
    assert manifest["batches"] == [1, 2]
    assert manifest["targets"] == ["sm_100", "sm_90"]
    assert set(manifest["versions"]) == {"flintc", "triton"}
    first = manifest["kernels"][0]
    assert (first["registers"], first["shared_bytes"], first["spill_stores"]) == (40, 1024, 0)


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    """In other folders, another process with another hash seed and umask, and from kernels in another order."""
    write_bundle(make_bundle(), tmp_path / "here")
    plan = make_plan()
    backwards = dict(reversed(make_compiled(plan).items()))
    write_bundle(build_bundle(plan, backwards, ORIGIN), tmp_path / "sub" / "there")
    program = "import os, sys; os.umask(0o077); from bundles import make_bundle; from flintc.bundle import write_bundle"
    program += "; from pathlib import Path; write_bundle(make_bundle(), Path('elsewhere'))"
    env = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=True)
    assert contents(tmp_path / "here") == contents(tmp_path / "sub" / "there") == contents(tmp_path / "elsewhere")


def test_digest_tells_bundles_apart() -> None:
    plan = make_plan()
    compiled = make_compiled(plan)
    key = ("add", "sm_90")
    bundles = [
        build_bundle(plan, compiled, ORIGIN),
        build_bundle(plan, compiled, replace(ORIGIN, batches=(1,))),
        build_bundle(plan, compiled, replace(ORIGIN, spec_sha256="cd" * 32)),
        build_bundle(plan, {**compiled, key: replace(compiled[key], cubin=b"other")}, ORIGIN),
        build_bundle(plan, {**compiled, key: replace(compiled[key], shared_bytes=0)}, ORIGIN),
        build_bundle(make_plan("pass\n"), compiled, ORIGIN),
    ]
    assert len({b.manifest.digest for b in bundles}) == len(bundles)
    assert make_bundle().manifest.digest == bundles[0].manifest.digest


def test_bundle_is_frozen() -> None:
    bundle = make_bundle()
    with pytest.raises(FrozenInstanceError):
        bundle.path = Path("x")  # type: ignore[misc]
    with pytest.raises(Exception, match="frozen"):
        bundle.manifest.spec = "x"


def test_other_target_is_refused_with_the_command_that_helps() -> None:
    bundle = make_bundle(targets=("sm_90",))
    for ask in (lambda: bundle.for_target("sm_100"), lambda: bundle.cubin("add", "sm_100")):
        with pytest.raises(BundleError) as caught:
            ask()
        assert "built for sm_90, not for sm_100" in str(caught.value)
        command = "flintc compile tiny --weights bf16 --target sm_100"
        assert f"({command}, with --for CHECKPOINT if this bundle was made so)" in str(caught.value)


def test_kernels_must_be_those_of_the_plan() -> None:
    plan = make_plan()
    compiled = make_compiled(plan)
    lacking = {key: c for key, c in compiled.items() if key[1] == "sm_90"} | {
        ("other", "sm_100"): compiled["add", "sm_100"]
    }
    for wrong in ({}, lacking, {**compiled, ("other", "sm_90"): compiled["add", "sm_90"]}):
        with pytest.raises(VerificationError, match="not those of the plan"):
            build_bundle(plan, wrong, ORIGIN)


def test_spills_are_warnings() -> None:
    assert make_bundle().manifest.warnings == ()
    warnings = make_bundle(targets=("sm_90",), spill=8).manifest.warnings
    assert warnings == ("kernel add spills registers on sm_90: 8 bytes stored, 16 loaded per thread",)


def test_a_bundle_may_cut_attention_otherwise_than_the_checkpoints_spec() -> None:
    """Into other chunks and fewer partials; its window is the model's."""
    built = build(bind_defaults(load_spec("tiny-flint")))
    ours, theirs = lower_attention(built, 16, 16, 3), lower_attention(built, 8, 4, 66)
    bundle = make_bundle()
    bundle = replace(bundle, plan=replace(bundle.plan, graph=ours))
    check_same_model(bundle, theirs, "bf16")
    for name in ("L2.attention", "L2.attention_merge"):
        op = theirs.ops[name]
        narrower = replace(op, attrs={**op.attrs, "window": 12})
        with pytest.raises(BundleError, match=rf"op {name} is .*window=13 there, .*window=12"):
            check_same_model(bundle, replace(theirs, ops={**theirs.ops, name: narrower}), "bf16")


def test_older_bundle_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_bundle(make_bundle(targets=("sm_90",)), out)
    (out / "kernels" / "left-over").write_text("damage")
    write_bundle(make_bundle(), out)
    assert load_bundle(out).manifest == make_bundle().manifest
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_empty_folder_is_taken_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        write_bundle(make_bundle(), out)
        assert load_bundle(out).manifest.spec == "tiny"


def test_what_is_no_bundle_is_left_alone(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("years of work")
    file = tmp_path / "file"
    file.write_text("text")
    mixed = tmp_path / "mixed"
    write_bundle(make_bundle(), mixed)
    (mixed / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    for out in (work, file, mixed):
        with pytest.raises(BundleError, match="is not a bundle"):
            write_bundle(make_bundle(), out)
    assert contents(tmp_path) == before


def test_failed_write_leaves_the_old_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up after the second file; then the last rename fails."""
    out = tmp_path / "out"
    write_bundle(make_bundle(targets=("sm_90",)), out)
    before = contents(tmp_path)
    write, calls = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(BundleError, match="No space left on device"):
            write_bundle(make_bundle(), out)
    assert contents(tmp_path) == before

    rename = Path.rename

    def refuse(path: Path, to: Path) -> Path:
        if to == out and not path.name.endswith(".old"):
            raise OSError(1, "Operation not permitted")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(folder.Path, "rename", refuse)
        with pytest.raises(BundleError, match="Operation not permitted"):
            write_bundle(make_bundle(), out)
    assert contents(tmp_path) == before


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    program = "import os; from bundles import make_bundle; from flintc.bundle import write_bundle"
    program += "; from pathlib import Path; Path.write_bytes = lambda *_: os._exit(9)"
    program += "; write_bundle(make_bundle(), Path('a'))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=False)
    assert killed.returncode == 9 and [p.name for p in tmp_path.iterdir()] != []
    with unfinished(tmp_path) as alive:
        write_bundle(make_bundle(), tmp_path / "b")
        assert alive.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_folder_that_another_process_has_just_made_is_let_be(tmp_path: Path) -> None:
    """It has no lock yet."""
    made = tmp_path / ".flintc-unfinished-0"
    made.mkdir()
    write_bundle(make_bundle(), tmp_path / "a")
    assert made.is_dir()


def test_written_folder_follows_the_umask(tmp_path: Path) -> None:
    """A temporary folder's private mode must not stick to the bundle."""
    write_bundle(make_bundle(), tmp_path / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_no_system_takes_is_told_as_any_other(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot write the bundle .*: File name too long"):
        write_bundle(make_bundle(), tmp_path / ("x" * 300))
