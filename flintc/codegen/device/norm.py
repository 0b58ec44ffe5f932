"""RMS normalisation."""

import triton
import triton.language as tl


@triton.jit
def rms_scale(x, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """rsqrt(mean(x^2) + eps) over all of x, FP32; elements past WIDTH are zero."""
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
