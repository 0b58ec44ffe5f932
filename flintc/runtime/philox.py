"""Philox4x32-10: a counter-based random generator (Salmon et al., SC11) in integer tensor operations.

The same (key, counter) gives the same words on every device, so that a sampled text can be repeated anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a * b, through 16-bit halves because int64 cannot hold the unsigned product."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    middle = (low >> 16) + high
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random 32-bit words for each counter under each key.

    All tensors are int64 of one shape and hold unsigned 32-bit words; so do the results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, a multiple of 2^-53, determined by (seed, position) alone.

    seeds, positions: int64[B]; a seed is taken as 64 bits. Result: float64[B].
    """
    zero = torch.zeros_like(seeds)
    counter = (positions & _MASK32, (positions >> 32) & _MASK32, zero, zero)
    high, low, _, _ = philox4x32(counter, (seeds & _MASK32, (seeds >> 32) & _MASK32))
    return ((high >> 5) * 2**26 + (low >> 6)).double() / 2**53
