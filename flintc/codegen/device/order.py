"""FP32 numbers as whole ones of the same order: 32-bit maxima are one instruction of a warp."""

import triton
import triton.language as tl

#: Below the order of every number.
NO_ORDER: tl.constexpr = tl.constexpr(-(1 << 31))


@triton.jit
def order_of(logits):
    """int32 that ascends with the logit; both zeros are equal."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    # Negative floats sort backwards by their bits: flip all but the sign.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(order):
    """The logit of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
