"""What a program says that it will read."""

import triton
import triton.language as tl

from flintc.codegen.device.mode import INTERPRET


@triton.jit
def send_for(pointers, wanted):
    """Bring the lines that hold what ``pointers`` point at, where ``wanted`` (bool of the same shape), towards L2.

    A hint: it reads nothing into the program, so memory that an earlier launch is still to write does no harm.
    """
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
