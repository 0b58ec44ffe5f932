"""Hand-written kernels for the tests of ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import replace

from flintc.ir.plan import Kernel, Param

_HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

_DOUBLE = (
    _HEADER
    + '''\
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """y = 2 x for n whole blocks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) * BLOCK < n:
        tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)
'''
)

_SPILL = (
    _HEADER
    + '''\
def spill(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Holds BLOCK values in registers across a barrier; one warp has room for fewer than 8192."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    total = tl.sum(x, 0)
    tl.store(y_ptr + at, x / total)
'''
)

_DOT = (
    _HEADER
    + '''\
def dot(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = x x in BF16; the operands go through shared memory."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.dot(x, x).to(tl.bfloat16))
'''
)

_TRAP = (
    _HEADER
    + '''\
def trap(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """What is left of a kernel that the compiler gives up."""
    at = tl.arange(0, BLOCK)
    x = tl.inline_asm_elementwise("trap;\\nmov.b32 $0, $1;", "=r,r", [tl.load(x_ptr + at)], tl.float32, False, 1)
    tl.store(y_ptr + at, x)
'''
)

DOUBLE = Kernel(
    name="double",
    source=_DOUBLE,
    params=(Param("x_ptr", "*fp32"), Param("y_ptr", "*fp32"), Param("n", "i32")),
    constants={"BLOCK": 1024, "WAITS": True},
    num_warps=4,
    num_stages=2,
    waits=True,
)
INDEPENDENT = replace(DOUBLE, constants={"BLOCK": 1024, "WAITS": False}, waits=False)
SPILL = Kernel("spill", _SPILL, (Param("x_ptr", "*fp32"), Param("y_ptr", "*fp32")), {"BLOCK": 16384}, 1, 1, False)
TRAP = Kernel("trap", _TRAP, (Param("x_ptr", "*fp32"), Param("y_ptr", "*fp32")), {"BLOCK": 64}, 1, 1, False)
DOT = Kernel("dot", _DOT, (Param("x_ptr", "*bf16"), Param("y_ptr", "*bf16")), {"BLOCK": 64}, 4, 1, False)


def unaligned(kernel: Kernel) -> Kernel:
    """The same kernel without the promise of aligned pointers."""
    return replace(kernel, params=tuple(replace(p, aligned=False) for p in kernel.params))
