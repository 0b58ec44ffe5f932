"""The choice of a token as :mod:`flintc.runtime.sampling` makes it: the same units, the same number, the same ties."""

import triton
import triton.language as tl

from flintc.codegen.device.philox import philox_uniform
from flintc.codegen.device.topk import NO_KEY, key_index, key_logit

#: Weight of the likeliest token: weights are whole numbers, so that their sums depend on no order.
UNITS: tl.constexpr = tl.constexpr(1 << 40)

#: Added to an FP64 number below 2^51 and taken away again, it leaves the nearest whole number, ties to even.
WHOLE: tl.constexpr = tl.constexpr(3 << 51)


@triton.jit
def load_word(words_ptr):
    """A 32-bit word as uint64."""
    return tl.load(words_ptr).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def load_double(words_ptr):
    """An FP64 number kept as two 32-bit words, the low one first."""
    return ((load_word(words_ptr + 1) << 32) | load_word(words_ptr)).to(tl.float64, bitcast=True)


@triton.jit
def best_keys(keys, count, K: tl.constexpr):
    """The ``count`` largest of all different ``keys``, best first, in int64 [K]; NO_KEY behind them."""
    rank = tl.arange(0, K)
    best = tl.full((K,), NO_KEY, tl.int64)
    for r in range(count):
        largest = tl.max(keys, 0)
        best = tl.where(rank == r, largest, best)
        keys = tl.where(keys == largest, NO_KEY, keys)
    return best


@triton.jit
def draw(best, temperature, top_k, top_p, key_low, key_high, position):
    """The id that a row's random number falls on, among its top_k best keys, best first."""
    rank = tl.arange(0, best.shape[0])
    first = key_logit(tl.max(best, 0)).to(tl.float64)
    taken = (rank < top_k) & (best != NO_KEY)
    below = tl.where(taken, (key_logit(best).to(tl.float64) - first) / temperature, 0.0)
    units = (tl.exp(below) * UNITS + WHOLE) - WHOLE
    weight = tl.where(taken, units.to(tl.int64), 0)
    before = tl.cumsum(weight, 0) - weight
    share = tl.where(top_p == 1.0, float("inf"), top_p * tl.sum(weight, 0).to(tl.float64))
    kept = tl.where(before.to(tl.float64) < share, weight, 0)
    number = philox_uniform(key_low, key_high, position.to(tl.uint64))
    target = (number * tl.sum(kept, 0).to(tl.float64)).to(tl.int64)
    choice = tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32), 0)
    return tl.sum(tl.where(rank == choice, key_index(best), 0), 0)
