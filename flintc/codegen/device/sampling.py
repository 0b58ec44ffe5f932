"""The choice of a token as :mod:`flintc.runtime.sampling` makes it: the same units, the same number, the same ties."""

import triton
import triton.language as tl

from flintc.codegen.device.order import NO_ORDER, logit_of
from flintc.codegen.device.philox import philox_uniform

#: Weight of the likeliest token: weights are whole numbers, so that their sums depend on no order.
UNITS: tl.constexpr = tl.constexpr(1 << 40)

#: Added to an FP64 number below 2^51 and taken away again, it leaves the nearest whole number, ties to even.
WHOLE: tl.constexpr = tl.constexpr(3 << 51)

#: Above every id.
NO_ID: tl.constexpr = tl.constexpr((1 << 31) - 1)


@triton.jit
def load_word(words_ptr):
    """A 32-bit word as uint64."""
    return tl.load(words_ptr).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def load_double(words_ptr):
    """An FP64 number kept as two 32-bit words, the low one first."""
    return ((load_word(words_ptr + 1) << 32) | load_word(words_ptr)).to(tl.float64, bitcast=True)


@triton.jit
def best_of(orders, ids, count, K: tl.constexpr):
    """Orders and ids of the ``count`` largest, best first, ties to the lowest id, in int32 [K] each.

    Ids are all different. NO_ORDER is no candidate; where there are too few, and behind them, NO_ORDER and NO_ID stand.
    """
    rank = tl.arange(0, K)
    best_orders = tl.full((K,), NO_ORDER, tl.int32)
    best_ids = tl.full((K,), NO_ID, tl.int32)
    for r in range(count):
        largest = tl.max(orders, 0)
        id = tl.min(tl.where((orders == largest) & (orders != NO_ORDER), ids, NO_ID), 0)
        best_orders = tl.where(rank == r, largest, best_orders)
        best_ids = tl.where(rank == r, id, best_ids)
        orders = tl.where(ids == id, NO_ORDER, orders)
    return best_orders, best_ids


@triton.jit
def draw(orders, temperature, top_k, top_p, key_low, key_high, position):
    """Rank of the id that a row's random number falls on, among its top_k best, best first."""
    rank = tl.arange(0, orders.shape[0])
    first = logit_of(tl.max(orders, 0)).to(tl.float64)
    taken = (rank < top_k) & (orders != NO_ORDER)
    below = tl.where(taken, (logit_of(orders).to(tl.float64) - first) / temperature, 0.0)
    units = (tl.exp(below) * UNITS + WHOLE) - WHOLE
    weight = tl.where(taken, units.to(tl.int64), 0)
    before = tl.cumsum(weight, 0) - weight
    share = tl.where(top_p == 1.0, float("inf"), top_p * tl.sum(weight, 0).to(tl.float64))
    kept = tl.where(before.to(tl.float64) < share, weight, 0)
    number = philox_uniform(key_low, key_high, position.to(tl.uint64))
    target = (number * tl.sum(kept, 0).to(tl.float64)).to(tl.int64)
    return tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32), 0)
