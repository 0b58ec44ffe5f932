"""The gated activation."""

import triton
import triton.language as tl

from flintc.codegen.device.numerics import round_bf16


@triton.jit
def silu_mul(gate, up):
    """bf16(silu(gate) * up), FP32 inside. Gate and up are what their op's output dtype made of them."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return round_bf16(gate / (1.0 + tl.exp(-gate)) * up)
