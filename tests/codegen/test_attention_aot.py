"""Attention kernels of Flint's size as machine code: registers, load widths, waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
from kv_cases import Sizes

from flintc.codegen.aot import compile_kernels
from flintc.codegen.families.attention import RUN_STAGES
from flintc.codegen.lint import lint
from flintc.codegen.planner import plan
from flintc.codegen.sass import disassemble
from flintc.ir.ops import splits
from flintc.ir.plan import CompiledKernel, Kernel

FULL = Sizes(heads=32, kv_heads=4, head=128, page=64, chunk=128, partials=66)
WINDOW = replace(FULL, chunk=64, window=513)
#: Pages that end within a tile, which then passes through shared memory.
SMALL_PAGES = replace(FULL, page=32)


@pytest.fixture(scope="module", params=[FULL, WINDOW, SMALL_PAGES], ids=["full", "window", "pages"])
def sizes(request: pytest.FixtureRequest) -> Sizes:
    found: Sizes = request.param
    return found


@pytest.fixture(scope="module", params=["attention", "attention_partial"])
def kernels(sizes: Sizes, request: pytest.FixtureRequest) -> list[Kernel]:
    """Of a launch that merges what it finds, or leaves that to another: one, or one for one row and one for several."""
    return dependent(sizes, request.param)


def dependent(sizes: Sizes, kind: str) -> list[Kernel]:
    """The kernels of a graph of one launch, dependent, which loads or sends for ahead what it may."""
    return list(plan(sizes.dependent(kind)).kernels.values())


@pytest.fixture(scope="module")
def compiled(kernels: list[Kernel]) -> list[CompiledKernel]:
    """They for both targets."""
    return list(compile_kernels(kernels, ["sm_90", "sm_100"]).values())


def test_nothing_spills_and_two_or_three_programs_fit_a_multiprocessor(compiled: list[CompiledKernel]) -> None:
    """Of the whole context and one row exactly two, since three would share it unevenly; of several rows three."""
    for kernel in compiled:
        # A thread is given registers by eights.
        registers = -(-kernel.registers // 8) * 8 * kernel.num_warps * 32
        fit = min(65536 // registers, 227 * 1024 // kernel.shared_bytes)
        assert kernel.spills == 0
        if kernel.kernel.endswith("_several"):
            assert fit >= 3
        else:
            assert fit >= 2 if "window" in kernel.kernel else fit == 2


def test_keys_and_values_come_in_16_byte_pieces(compiled: list[CompiledKernel]) -> None:
    """Into registers, 4 KiB of each a warp and tile, without a detour; with small pages, by asynchronous copies.

    Those are all but one stage's keys and values ahead of the loop, and one more inside it.
    """
    tile = 2 * (16 * 128 * 2) // (32 * 16)
    for kernel in compiled:
        copies = [line for line in kernel.ptx.splitlines() if ".shared.global" in line]
        if not copies:
            assert kernel.ptx.count("ld.global.v4.b32") >= tile
            continue
        assert kernel.shared_bytes > 64 * 1024
        assert len(copies) == RUN_STAGES * tile
        assert all("cp.async.cg" in line and "0x10" in line for line in copies)
        # While a tile is in use, the next ones' keys and values stay on their way.
        assert f"cp.async.wait_group \t{2 * (RUN_STAGES - 2)}" in kernel.ptx


def test_only_tiles_of_several_pages_pass_through_shared_memory(sizes: Sizes, compiled: list[CompiledKernel]) -> None:
    staged = sizes is SMALL_PAGES
    for kernel in compiled:
        assert (".shared.global" in kernel.ptx) == staged


def test_one_trigger_then_one_wait_and_above_it_only_earlier_positions_of_the_cache(
    sizes: Sizes, kernels: list[Kernel]
) -> None:
    """On every path; a program without a run waits and leaves.

    Through shared memory nothing is loaded above the wait, but sent for.
    """
    read = {("read", f"{name}_ptr", False) for name in ("positions", "seqs", "block_table")}
    cache = ("hint", "cache_ptr", False) if sizes is SMALL_PAGES else ("read", "cache_ptr", True)
    for kernel in kernels:
        above = [tuple(takewhile(lambda e: e.kind != "wait", path)) for path in kernel.paths]
        for path in kernel.paths:
            assert [e.kind for e in path].count("wait") == [e.kind for e in path].count("trigger") == 1
        found = {(e.kind, e.param, bool(e.earlier)) for effects in above for e in effects}
        assert found == {*read, cache, ("trigger", "", False)}


def test_the_same_in_machine_code(sizes: Sizes, kernels: list[Kernel], compiled: list[CompiledKernel]) -> None:
    """Lanes load all of a tile's keys and values above the wait; of the whole context and several rows its keys."""
    for kernel, made in ((k, c) for k in kernels for c in compiled if c.kernel == k.name):
        assert lint(kernel, made) == []
        sass = disassemble(made.cubin)
        # One wait of the programs that have work, and over the whole context another of those that leave.
        assert (sass.triggers, sass.waits) == (1, 1 if "window" in kernel.name else 2)
        # Keys and values: nothing else is sent for, and nothing comes by asynchronous copies before.
        assert sass.text.count("CCTL.E.PF2") == (2 if sizes is SMALL_PAGES else 0)
        assert "LDGSTS" not in [opcode.partition(".")[0] for opcode in sass.before_wait]
        # A warp's 16 positions, 256 bytes each.
        wide = [text.count("LDG.E.128") for text in sass.text.split("ACQBULK")]
        assert max(wide[:-1]) == (0 if sizes is SMALL_PAGES else 8 if kernel.name.endswith("_several") else 16)


@pytest.mark.parametrize("sizes", [FULL, WINDOW], ids=["full", "window"])
def test_a_load_of_the_cache_that_moved_above_the_wait(sizes: Sizes) -> None:
    """Machine code that has one more there than the PTX beside it."""
    for kernel in dependent(sizes, "attention_partial"):
        count = 8 if kernel.name.endswith("_several") else 16
        for made in compile_kernels([kernel], ["sm_90", "sm_100"]).values():
            lines = made.ptx.splitlines(keepends=True)
            at = next(i for i, line in enumerate(lines) if "ld.global.v4" in line)
            fewer = replace(made, ptx="".join([*lines[:at], *lines[at + 1 :]]))
            assert lint(kernel, made) == []
            (found,) = lint(kernel, fewer)
            assert found == f"its machine code has {count} loads through cache_ptr above the wait, its PTX {count - 1}"


@pytest.mark.parametrize("sizes", [FULL, WINDOW], ids=["full", "window"])
def test_a_merge_of_its_own_has_all_partials_on_their_way_at_once(sizes: Sizes) -> None:
    """Above the wait are the rows' numbers and the sink alone; below it nothing is computed before the last load."""
    kernels = dependent(sizes, "attention_merge")
    (kernel,) = kernels
    (path,) = kernel.paths
    assert [e.kind for e in path].count("wait") == [e.kind for e in path].count("trigger") == 1
    above = takewhile(lambda e: e.kind != "wait", path)
    assert {(e.kind, e.param) for e in above if e.kind == "read"} == {
        ("read", f"{name}_ptr") for name in ("positions", "seqs", "sinks")
    }
    for made in compile_kernels(kernels, ["sm_90", "sm_100"]).values():
        assert lint(kernel, made) == []
        assert made.spills == 0 and made.num_warps == 1
        sass = disassemble(made.cubin)
        assert (sass.triggers, sass.waits) == (1, 1)
        loads = [i for i, opcode in enumerate(sass.opcodes) if opcode.startswith("LDG")]
        assert loads[-1] < next(i for i, opcode in enumerate(sass.opcodes) if opcode.startswith("MUFU.EX2"))
        assert sass.load_widths()[128] >= splits(**sizes.cut) * 32 * 4 // (32 * 16)
