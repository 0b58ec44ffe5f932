"""Attention kernels of Flint's size as machine code: registers, load widths, waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kv_cases import Sizes

from flintc.codegen.aot import compile_kernels
from flintc.codegen.families.attention import RUN_STAGES
from flintc.codegen.planner import plan
from flintc.codegen.sass import disassemble
from flintc.ir.graph import Dependent
from flintc.ir.plan import CompiledKernel

FULL = Sizes(heads=32, kv_heads=4, head=128, page=64, chunk=512)
WINDOW = replace(FULL, chunk=64, window=513)


@pytest.fixture(scope="module", params=[FULL, WINDOW], ids=["full", "window"])
def compiled(request: pytest.FixtureRequest) -> list[CompiledKernel]:
    """The dependent launch of the fused kernel, for both targets."""
    graph = request.param.graph("attention")
    launches = tuple(replace(x, dependent=Dependent(("cache", "sinks"))) for x in graph.launches)
    kernels = plan(graph.with_launches(launches)).kernels.values()
    return list(compile_kernels(kernels, ["sm_90", "sm_100"]).values())


def test_nothing_spills_and_two_programs_fit_a_multiprocessor(compiled: list[CompiledKernel]) -> None:
    """Those of the whole context exactly two: three would share it unevenly."""
    for kernel in compiled:
        assert "window" in kernel.kernel or kernel.shared_bytes * 3 > 227 * 1024
        assert kernel.spills == 0
        assert kernel.registers * kernel.num_warps * 32 * 2 <= 65536
        assert kernel.shared_bytes * 2 <= 227 * 1024


def test_keys_and_values_come_as_asynchronous_16_byte_copies(compiled: list[CompiledKernel]) -> None:
    """All but one stage's keys and values, 4 KiB each a warp and tile, ahead of the loop; one more inside it.

    A window's chunk is one tile, which nothing overlaps: it comes by loads of 16 bytes, one after the other.
    """
    tile = 2 * (16 * 128 * 2) // (32 * 16)
    for kernel in compiled:
        copies = [line for line in kernel.ptx.splitlines() if ".shared.global" in line]
        if "window" in kernel.kernel:
            assert not copies and kernel.ptx.count("ld.global.v4.b32") >= tile
            continue
        assert len(copies) == RUN_STAGES * tile
        assert all("cp.async.cg" in line and "0x10" in line for line in copies)
        # While a tile is in use, the next ones' keys and values stay on their way.
        assert f"cp.async.wait_group \t{2 * (RUN_STAGES - 2)}" in kernel.ptx


def test_one_trigger_then_one_wait_and_only_a_hint_at_the_cache_above_it(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        sass = disassemble(kernel.cubin)
        assert (sass.triggers, sass.waits) == (1, 1)
        before = [opcode.partition(".")[0] for opcode in sass.before_wait]
        # Position, sequence, pages of two tiles and of the hint: nothing of the cache itself.
        assert before.count("LDG") <= 5
        assert "LDGSTS" not in before
        assert "STG" not in before
        assert before.count("CCTL") == 2
