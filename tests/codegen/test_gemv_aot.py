"""The matrix-vector kernels at the sizes of Flint, compiled for the H200: what the machine code must look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from gemv_graphs import Sizes, chained, expert_down, expert_gate_up, expert_linear, gate_up, linear, qkv, route
from launches import only_kernel

from flintc.codegen.aot import compile_kernels
from flintc.codegen.planner import plan
from flintc.codegen.sass import disassemble
from flintc.ir.graph import Graph
from flintc.ir.plan import CompiledKernel
from flintc.ir.types import DType, resolve

FLINT = Sizes(experts=256)

GRAPHS: Mapping[str, Callable[[DType], Graph]] = {
    "o": lambda w: linear(2048, 4096, weights=w),
    "dense_down": lambda w: linear(2048, 6144, weights=w),
    "head": lambda w: linear(150_144, 2048, "f32", w),
    "gate_up": lambda w: gate_up(FLINT, w),
    "qkv_full": lambda w: qkv(FLINT, rotate=False, weights=w),
    "qkv_window": lambda w: qkv(FLINT, rotate=True, weights=w),
    "expert_linear": lambda w: expert_linear(FLINT, own=True, weights=w),
    "expert_gate_up": lambda w: expert_gate_up(FLINT, shared=True, weights=w),
    "expert_down": lambda w: expert_down(FLINT, shared=True, weights=w),
    "route": lambda w: route(FLINT, add=True),
}
TILES = {"head": 64, "route": 4}


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("name", GRAPHS)
def test_machine_code_at_full_size(name: str, weights: DType) -> None:
    """No spills; weights in 16-byte loads, those known beforehand above the wait; the trigger first of all."""
    kernels = plan(chained(GRAPHS[name](weights), TILES.get(name, 16))).kernels.values()
    for compiled in compile_kernels(kernels, ["sm_90"], jobs=1).values():
        check_machine_code(name, compiled)


def wide_loads(opcodes: Sequence[str]) -> int:
    """Loads of 16 bytes a lane."""
    return sum(opcode.startswith("LDG.E.128") for opcode in opcodes)


def check_machine_code(name: str, compiled: CompiledKernel) -> None:
    assert compiled.spills == 0
    code = disassemble(compiled.cubin)
    assert code.local_accesses == 0
    assert code.triggers == 1 and code.waits >= 1
    wide, known = wide_loads(code.opcodes), wide_loads(code.before_wait)
    assert wide >= (3 if name == "expert_linear" else 8)
    # Whose experts they are is not known above the wait; expert_down reads the shared one's beside theirs.
    assert known >= 4 if name not in ("expert_linear", "expert_down") else known == 0
    if name != "route":
        assert code.count("HMMA") > 0


def test_a_lane_loads_an_eighth_of_a_lone_vector() -> None:
    """Two loads below the wait, where several vectors take sixteen."""
    kernels = plan(chained(GRAPHS["o"]("nvfp4"), 16)).kernels
    for compiled in compile_kernels(kernels.values(), ["sm_90"], jobs=1).values():
        code = disassemble(compiled.cubin)
        below = wide_loads(code.opcodes) - wide_loads(code.before_wait)
        assert below == (2 if kernels[compiled.kernel].several else 16)


@pytest.mark.parametrize("name", ["qkv_full", "qkv_window", "o", "gate_up"])
def test_weights_are_unpacked_above_the_wait(name: str) -> None:
    """Those of qkv and o: by multiplications of pairs, of which the epilogues have none."""
    kernel = only_kernel(chained(GRAPHS[name]("nvfp4"), 16))
    (compiled,) = compile_kernels([kernel], ["sm_90"], jobs=1).values()
    code = disassemble(compiled.cubin)
    above, all_of_them = (
        sum(opcode.startswith("HMUL2.BF16") for opcode in opcodes) for opcodes in (code.before_wait, code.opcodes)
    )
    assert all_of_them >= 128
    assert (above == all_of_them) == (name != "gate_up")


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("name", GRAPHS)
def test_no_load_is_masked_at_full_size(name: str, weights: DType) -> None:
    kernel = only_kernel(chained(GRAPHS[name](weights), TILES.get(name, 16)))
    assert kernel.constants.get("EVEN", True) and kernel.constants.get("SHARED_EVEN", True)


@pytest.mark.parametrize("name", GRAPHS)
def test_grid_fills_half_the_gpu(name: str) -> None:
    """Of 132 SMs; with one row in the step."""
    (launch,) = plan(chained(GRAPHS[name]("bf16"), TILES.get(name, 16))).launches
    programs = 1
    for extent in launch.grid:
        programs *= resolve(extent, {"B": 1})
    assert programs >= 64
