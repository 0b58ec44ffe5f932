"""Ahead-of-time compilation: what comes out of it, its cache, its errors, its reproducibility."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aot_kernels import DOT, DOUBLE, INDEPENDENT, SPILL, TRAP, unaligned

from flintc.codegen import aot
from flintc.codegen.aot import compile_kernels
from flintc.codegen.cache import Store, cache_root
from flintc.codegen.sass import disassemble, resource_usage
from flintc.errors import CompileError, UsageError, VerificationError
from flintc.ir.plan import CompiledKernel

Compiled = dict[tuple[str, str], CompiledKernel]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache_dir: Path) -> Compiled:
    return compile_kernels([DOUBLE, SPILL, DOT], ["sm_90", "sm_100"], cache_dir=cache_dir)


def stored(cache_dir: Path) -> list[Path]:
    return sorted(p for p in (cache_dir / "kernels").rglob("*") if p.is_file())


def test_every_kernel_for_every_target_in_order(compiled: Compiled) -> None:
    assert list(compiled) == [(k, t) for k in ("double", "spill", "dot") for t in ("sm_90", "sm_100")]
    assert all((c.kernel, c.target) == key and c.entry == key[0] for key, c in compiled.items())


def test_cubins_are_elf_files_for_their_architecture(compiled: Compiled) -> None:
    for (_, target), c in compiled.items():
        magic, machine = struct.unpack_from("<4s14xH", c.cubin)
        assert magic == b"\x7fELF"
        assert machine == 190, "EM_CUDA"
        assert re.search(r"\.target (\S+)", c.ptx)[1] == f"{target}a"  # type: ignore[index]
        listing = disassemble(c.cubin).text
        assert re.search(rf"EF_CUDA_{target.upper().replace('_', '')}\b|\.target\s+{target}a", listing)


def test_resources_agree_with_cuobjdump(compiled: Compiled) -> None:
    """ptxas reports them while compiling; cuobjdump reads them from the cubin."""
    for (name, _), c in compiled.items():
        usage = resource_usage(c.cubin)
        assert c.registers == usage.registers
        assert bool(c.spills) == bool(usage.stack) == (name == "spill")
        assert bool(disassemble(c.cubin).local_accesses) == (name == "spill")


def test_a_budget_of_registers_gives_way_by_one_step_rather_than_spill(compiled: Compiled, cache_dir: Path) -> None:
    """The lowest budget that does not spill has got a few registers more than it asked for; those below it spill."""
    roomy = replace(SPILL, constants={"BLOCK": 2048})

    def within(budget: int) -> CompiledKernel:
        return compile_kernels([replace(roomy, max_registers=budget)], ["sm_90"], cache_dir=cache_dir)["spill", "sm_90"]

    budget = within(0).registers // 8 * 8
    while not within(budget - 8).spills:
        budget -= 8
    assert budget < within(budget).registers <= budget + 8
    assert within(budget - 8).registers <= budget - 8


def test_shared_memory_holds_the_operands_of_a_dot(compiled: Compiled) -> None:
    assert compiled["double", "sm_90"].shared_bytes == 0
    assert compiled["dot", "sm_90"].shared_bytes >= 64 * 64 * 2


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_a_target_gets_the_same_alone_and_beside_another(tmp_path: Path, compiled: Compiled, target: str) -> None:
    """Targets of one kernel are compiled from one TTIR, which therefore may hold nothing of a target."""
    alone = compile_kernels([DOUBLE, SPILL, DOT], [target], cache_dir=tmp_path)
    assert alone == {key: made for key, made in compiled.items() if key[1] == target}


def test_params_are_those_of_the_cubin(compiled: Compiled) -> None:
    c = compiled["double", "sm_90"]
    assert c.params == ("x_ptr", "y_ptr", "n", "global_scratch", "profile_scratch")
    for c in compiled.values():
        declared = re.findall(rf"\.param \.(\w+).*{c.entry}_param_\d+", c.ptx)
        assert len(c.params) == len(declared)
        assert all(type_ == "u64" for type_ in declared[-2:])


def test_alignment_widens_loads(cache_dir: Path, compiled: Compiled) -> None:
    narrow = compile_kernels([unaligned(DOUBLE)], ["sm_90"], cache_dir=cache_dir)["double", "sm_90"]
    assert set(disassemble(compiled["double", "sm_90"].cubin).load_widths()) == {128}
    assert set(disassemble(narrow.cubin).load_widths()) == {32}


def test_dependent_launch_instructions(cache_dir: Path, compiled: Compiled) -> None:
    for target in ("sm_90", "sm_100"):
        sass = disassemble(compiled["double", target].cubin)
        assert (sass.waits, sass.triggers) == (1, 1)
        assert not any(opcode.startswith(("LDG", "STG")) for opcode in sass.before_wait)
    alone = disassemble(compile_kernels([INDEPENDENT], ["sm_90"], cache_dir=cache_dir)["double", "sm_90"].cubin)
    assert (alone.waits, alone.triggers) == (0, 0)
    assert alone.before_wait == alone.opcodes


def test_second_run_compiles_nothing(cache_dir: Path, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "run_requests", lambda requests, workers: pytest.fail("compiled") if requests else ())
    calls: list[tuple[int, int, str]] = []
    again = compile_kernels(
        [DOUBLE, SPILL, DOT], ["sm_90", "sm_100"], cache_dir=cache_dir, progress=lambda *call: calls.append(call)
    )
    assert again == compiled
    assert [call[:2] for call in calls] == [(i + 1, 6) for i in range(6)]


def test_each_input_is_part_of_the_key() -> None:
    variants = [
        DOUBLE,
        INDEPENDENT,
        replace(DOUBLE, waits=False),
        unaligned(DOUBLE),
        replace(DOUBLE, source=DOUBLE.source + "\n"),
        replace(DOUBLE, num_warps=8),
        replace(DOUBLE, num_stages=3),
        replace(DOUBLE, constants={"BLOCK": 512, "WAITS": True}),
        replace(DOUBLE, constants={"BLOCK": 1024, "WAITS": 1}),
    ]
    keys = {aot._Build(kernel, target).key for kernel in variants for target in aot.TARGETS}
    assert len(keys) == len(variants) * len(aot.TARGETS)


def test_another_triton_does_not_reuse_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    before = aot._Build(DOUBLE, "sm_90").key
    monkeypatch.setattr(aot, "version", lambda package: "9.9.9")
    assert aot._Build(DOUBLE, "sm_90").key != before


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_damaged_entry_is_rebuilt(tmp_path: Path, damage: str) -> None:
    first = compile_kernels([DOUBLE], ["sm_90"], cache_dir=tmp_path)
    (entry,) = stored(tmp_path)
    whole = entry.read_bytes()
    middle = len(whole) // 2
    broken = {
        "flip": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "truncate": whole[:-1],
        "empty": b"",
    }
    entry.write_bytes(broken[damage])
    assert compile_kernels([DOUBLE], ["sm_90"], cache_dir=tmp_path) == first
    assert entry.read_bytes() == whole
    assert stored(tmp_path) == [entry], "nothing else is left in the cache"


_COMPILE_AND_HASH = """
import hashlib, json, sys
from aot_kernels import DOT, DOUBLE, SPILL
from flintc.codegen.aot import compile_kernels
built = compile_kernels([DOUBLE, SPILL, DOT], ["sm_90", "sm_100"], jobs=int(sys.argv[1]))
print(json.dumps({" ".join(k): hashlib.sha256(c.cubin + c.ptx.encode()).hexdigest() for k, c in built.items()}))
"""


@pytest.mark.parametrize("user", ["a", "b"])
def test_same_bytes_from_any_folder_and_user(tmp_path: Path, compiled: Compiled, user: str) -> None:
    """Another home, folder, temporary folder, cache, number of jobs, hash seed and a hostile environment."""
    home = tmp_path / f"home of {user}"
    (home / "tmp").mkdir(parents=True)
    env = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "USER": user,
        "PYTHONHASHSEED": "7" if user == "a" else "random",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(home / "elsewhere"),
        "DISABLE_PTXAS_OPT": "1",
    }
    env.pop("FLINTC_CACHE", None)
    env.pop("XDG_CACHE_HOME", None)
    jobs = "1" if user == "a" else "2"
    command = [sys.executable, "-c", _COMPILE_AND_HASH, jobs]
    out = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, check=True).stdout
    expected = {" ".join(k): hashlib.sha256(c.cubin + c.ptx.encode()).hexdigest() for k, c in compiled.items()}
    assert json.loads(out) == expected
    assert {p.name for p in home.iterdir()} == {"tmp", ".cache"}
    assert list((home / "tmp").iterdir()) == [], "temporary files are gone"
    assert [p.name for p in (home / ".cache").iterdir()] == ["flintc"], "nothing of Triton's is left in the home"


def test_cubins_name_no_file(compiled: Compiled) -> None:
    for c in compiled.values():
        for text in (c.cubin, c.ptx.encode()):
            assert b"/tmp" not in text
            assert b".py" not in text
            assert str(Path.home()).encode() not in text


def test_compile_error_names_kernel_and_keeps_its_source(tmp_path: Path) -> None:
    bad = replace(DOUBLE, source=DOUBLE.source.replace("tl.load(x_ptr + at) * 2", "undefined_name"))
    with pytest.raises(CompileError) as caught:
        compile_kernels([DOT, bad], ["sm_90"], cache_dir=tmp_path)
    message = str(caught.value)
    assert message.startswith("kernel double does not compile for sm_90: ")
    assert "undefined_name" in message
    assert "\n" not in message
    source = tmp_path / "failed" / "double.sm_90.py"
    assert str(source) in message
    assert source.read_text() == bad.source
    assert "Traceback" in source.with_suffix(".log").read_text()


def test_a_kernel_that_traps_is_refused(tmp_path: Path) -> None:
    """Triton compiles what does not fit a target's tensor memory to a trap, and reports success."""
    with pytest.raises(CompileError, match=r"kernel trap does not compile for sm_90: .*gave the kernel up"):
        compile_kernels([TRAP], ["sm_90"], cache_dir=tmp_path)


def test_what_compiled_before_a_target_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell has no ``wgmma``: the error names it, and what Hopper got is in the cache."""
    hopper = replace(TRAP, source=TRAP.source.replace("trap;", "wgmma.fence.sync.aligned;"))
    with pytest.raises(CompileError, match="kernel trap does not compile for sm_100"):
        compile_kernels([hopper], ["sm_90", "sm_100"], cache_dir=tmp_path)
    monkeypatch.setattr(aot, "run_requests", lambda requests, workers: pytest.fail("compiled") if requests else ())
    assert compile_kernels([hopper], ["sm_90"], cache_dir=tmp_path)["trap", "sm_90"].cubin


def test_worker_that_dies_is_an_error_not_a_hang(tmp_path: Path) -> None:
    deadly = replace(DOUBLE, source="import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(CompileError, match=r"the compiler process died \(killed by SIGKILL\)"):
        compile_kernels([deadly, DOT, SPILL], ["sm_90"], jobs=2, cache_dir=tmp_path)


def test_no_process_outlives_a_failure(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    slow = f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(pid_file)!r}).exists(): time.sleep(0.01)\n1 / 0\n"
    hanging, failing = replace(DOUBLE, name="hanging", source=slow), replace(DOUBLE, name="failing", source=wait)
    with pytest.raises(CompileError, match="division by zero"):
        compile_kernels([hanging, failing], ["sm_90"], jobs=2, cache_dir=tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(DOUBLE, params=(DOUBLE.params[1], DOUBLE.params[0], DOUBLE.params[2])),
        replace(DOUBLE, params=DOUBLE.params[:2]),
        replace(DOUBLE, constants={**DOUBLE.constants, "EXTRA": 1}),
        replace(DOUBLE, constants={"BLOCK": 1024}),
    ],
    ids=["order", "missing", "extra constant", "missing constant"],
)
def test_description_must_match_the_entry(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(CompileError, match="the entry takes"):
        compile_kernels([wrong], ["sm_90"], cache_dir=tmp_path)  # type: ignore[list-item]


def test_source_without_the_entry(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"no @triton\.jit function other"):
        compile_kernels([replace(DOUBLE, name="other")], ["sm_90"], cache_dir=tmp_path)


def test_unknown_target_and_clashing_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown target 'sm_89'.*sm_90, sm_100"):
        compile_kernels([DOUBLE], ["sm_89"], cache_dir=tmp_path)
    with pytest.raises(VerificationError, match="two different kernels are called double"):
        compile_kernels([DOUBLE, INDEPENDENT], ["sm_90"], cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_repeated_kernels_and_targets_are_compiled_once(cache_dir: Path, compiled: Compiled) -> None:
    calls: list[str] = []
    got = compile_kernels(
        [DOUBLE, DOUBLE], ["sm_90", "sm_90"], cache_dir=cache_dir, progress=lambda *call: calls.append(call[2])
    )
    assert got == {("double", "sm_90"): compiled["double", "sm_90"]}
    assert calls == ["double"]


def test_cache_that_cannot_be_written_loses_no_work(tmp_path: Path, compiled: Compiled) -> None:
    (tmp_path / "file").write_text("")
    got = compile_kernels([DOUBLE], ["sm_90"], cache_dir=tmp_path / "file")
    assert got["double", "sm_90"] == compiled["double", "sm_90"]


def test_cache_root_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "chosen"
    monkeypatch.setenv("FLINTC_CACHE", "")
    assert cache_root() == tmp_path / "xdg" / "flintc"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / "home" / ".cache" / "flintc"
    assert list(tmp_path.iterdir()) == [], "asking creates nothing"


def test_store_keeps_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.get("abcd") is None
    store.put("abcd", b"")
    store.put("abce", bytes(range(256)))
    assert (store.get("abcd"), store.get("abce")) == (b"", bytes(range(256)))
    store.put("abcd", b"again")
    assert store.get("abcd") == b"again"
