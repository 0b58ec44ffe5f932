"""Rounding and products that mean the same on the GPU and in the interpreter."""

import triton
import triton.language as tl

from flintc.codegen.device.mode import INTERPRET


@triton.jit
def round_bf16(x):
    """FP32 -> BF16, to nearest, ties to even."""
    if INTERPRET:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Adding the rounding bias would carry a NaN's payload into the exponent of infinity.
        quiet = (bits >> 16) | 0x40
        half = tl.where(x == x, rounded, quiet)
        return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a @ b for BF16 a and b (two- or three-dimensional), FP32 accumulate."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)
