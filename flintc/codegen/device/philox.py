"""Random numbers by counter: Philox4x32-10, the words of :mod:`flintc.runtime.philox`."""

import triton
import triton.language as tl

_MULTIPLIER_0: tl.constexpr = tl.constexpr(0xD2511F53)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0: tl.constexpr = tl.constexpr(0x9E3779B9)
_KEY_STEP_1: tl.constexpr = tl.constexpr(0xBB67AE85)
_MASK32: tl.constexpr = tl.constexpr(0xFFFFFFFF)


@triton.jit
def philox_uniform(key_low, key_high, counter):
    """FP64 in [0, 1), a multiple of 2^-53, from a key of two words and a counter below 2^32 (all uint64)."""
    c0, c1 = counter, counter * 0
    c2, c3 = c1, c1
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK32
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK32
        k0 = (k0 + _KEY_STEP_0) & _MASK32
        k1 = (k1 + _KEY_STEP_1) & _MASK32
    bits = ((c0 >> 5) << 26) | (c1 >> 6)
    return bits.to(tl.float64) * (1.0 / (1 << 53))
