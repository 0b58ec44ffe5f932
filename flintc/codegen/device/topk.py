"""The k best experts of each row and their weights."""

import triton
import triton.language as tl

from flintc.codegen.device.order import NO_ORDER, logit_of, order_of


@triton.jit
def choose(
    logits_ptr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PARTS: tl.constexpr = 1,
):
    """The CHOSEN largest of the EXPERTS logits (FP32) of a row at ``logits_ptr``, best first, ties to the lowest index.

    A logit is the sum of PARTS numbers, EXPERTS apart, the last of which is added first.

    Returns ids int32 and weights FP32, [power of two >= CHOSEN]; elements past CHOSEN hold 0.

    Logits are held 32 to a tensor, one a lane, every warp holding all of them: no round of the choice needs a barrier.
    """
    lane = tl.arange(0, 32)
    orders = ()
    for first in tl.static_range(0, EXPERTS, 32):
        index = first + lane
        logit = tl.zeros((32,), tl.float32)
        for part in tl.static_range(PARTS - 1, -1, -1):
            logit += tl.load(logits_ptr + part * EXPERTS + index, mask=index < EXPERTS, other=0.0)
        orders = orders + (tl.where(index < EXPERTS, order_of(logit), NO_ORDER),)
    rank = tl.arange(0, triton.next_power_of_2(CHOSEN))
    ids = tl.zeros(rank.shape, tl.int32)
    chosen = tl.full(rank.shape, NO_ORDER, tl.int32)
    left = orders
    for r in tl.static_range(CHOSEN):
        best, id = best_left(left)
        chosen = tl.where(rank == r, best, chosen)
        ids = tl.where(rank == r, id, ids)
        left = without(left, id)
    taken = rank < CHOSEN
    score = tl.where(taken, logit_of(chosen), 0.0)
    if SOFTMAX:
        # The best logit is the largest: no second maximum is needed.
        top = tl.max(tl.where(taken, score, float("-inf")), 0)
        terms = tl.zeros((32,), tl.float32)
        for group in tl.static_range(len(orders)):
            terms += tl.where(orders[group] != NO_ORDER, tl.exp(logit_of(orders[group]) - top), 0.0)
        weight = tl.exp(score - top) / tl.sum(terms, 0)
    else:
        weight = 1.0 / (1.0 + tl.exp(-score))
    weight = tl.where(taken, weight, 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    return ids, weight


@triton.jit
def best_left(orders):
    """The largest of some tensors of 32 orders, and the lowest index that has it, counted through them all."""
    largest = orders[0]
    for group in tl.static_range(1, len(orders)):
        largest = tl.maximum(largest, orders[group])
    best = tl.max(largest, 0)
    id = tl.full((32,), 0x7FFFFFFF, tl.int32)
    for group in tl.static_range(len(orders) - 1, -1, -1):
        id = tl.where(orders[group] == best, group * 32 + tl.arange(0, 32), id)
    return best, tl.min(id, 0)


@triton.jit
def without(orders, id):
    """The orders with that of index ``id`` taken out."""
    left = ()
    for group in tl.static_range(len(orders)):
        left = left + (tl.where(group * 32 + tl.arange(0, 32) == id, NO_ORDER, orders[group]),)
    return left
