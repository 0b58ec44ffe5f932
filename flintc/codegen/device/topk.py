"""The k best experts of each row and their weights."""

import triton
import triton.language as tl

from flintc.codegen.device.order import NO_ORDER, logit_of, order_of

#: Past the index of every expert.
NOBODY: tl.constexpr = tl.constexpr(0x7FFFFFFF)


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

    Each lane holds lists of up to four neighbours, sorted, and every warp holds all of them: a round looks at the heads
    of the lists alone, and needs no barrier.
    """
    EACH: tl.constexpr = triton.next_power_of_2((EXPERTS + 31) // 32)
    LIST: tl.constexpr = EACH if EACH < 4 else 4
    lane = tl.arange(0, 32)
    orders, ids = (), ()
    for first in tl.static_range(0, EACH, LIST):
        index = lane[:, None] * EACH + first + tl.arange(0, LIST)[None, :]
        logit = tl.zeros((32, LIST), tl.float32)
        for part in tl.static_range(PARTS - 1, -1, -1):
            logit += tl.load(logits_ptr + part * EXPERTS + index, mask=index < EXPERTS, other=0.0)
        orders = orders + elements(tl.where(index < EXPERTS, order_of(logit), NO_ORDER))
        ids = ids + elements(index)
    all_orders = orders
    orders, ids = sorted_lists(orders, ids, LIST)
    rank = tl.arange(0, triton.next_power_of_2(CHOSEN))
    best_ids = tl.zeros(rank.shape, tl.int32)
    chosen = tl.full(rank.shape, NO_ORDER, tl.int32)
    for r in tl.static_range(CHOSEN):
        best, id = best_head(orders, ids, LIST)
        chosen = tl.where(rank == r, best, chosen)
        best_ids = tl.where(rank == r, id, best_ids)
        orders = without_head(orders, ids, id, LIST, NO_ORDER)
        ids = without_head(ids, ids, id, LIST, NOBODY)
    taken = rank < CHOSEN
    score = tl.where(taken, logit_of(chosen), 0.0)
    if SOFTMAX:
        # The best logit is the largest: no second maximum is needed.
        top = tl.max(tl.where(taken, score, float("-inf")), 0)
        terms = tl.zeros((32,), tl.float32)
        for group in tl.static_range(len(all_orders)):
            terms += tl.where(all_orders[group] != NO_ORDER, tl.exp(logit_of(all_orders[group]) - top), 0.0)
        weight = tl.exp(score - top) / tl.sum(terms, 0)
    else:
        weight = 1.0 / (1.0 + tl.exp(-score))
    weight = tl.where(taken, weight, 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    return best_ids, weight


@triton.jit
def elements(values):
    """The columns of ``values`` [32, 1, 2 or 4] as a tuple of [32]; within each thread, where one warp runs it."""
    if values.shape[1] == 4:
        evens, odds = tl.split(tl.reshape(values, (32, 2, 2)))
        first, third = tl.split(evens)
        second, fourth = tl.split(odds)
        return first, second, third, fourth
    elif values.shape[1] == 2:
        return tl.split(values)
    else:
        return (tl.reshape(values, (32,)),)


@triton.jit
def sorted_lists(orders, ids, LIST: tl.constexpr):
    """Each LIST neighbours sorted, the largest first, those that are equal as they were: neighbours change places."""
    for step in tl.static_range(LIST):
        for at in tl.static_range(len(orders) - 1):
            # Every other pair of a list in turn, none across two lists.
            if at % LIST % 2 == step % 2 and at % LIST < LIST - 1:
                later = orders[at + 1] > orders[at]
                orders, ids = exchanged(orders, at, later), exchanged(ids, at, later)
    return orders, ids


@triton.jit
def exchanged(values, AT: tl.constexpr, where):
    """The tuple ``values``, those at AT and after it in each other's place ``where`` (bool) that is so."""
    one, two = values[AT], values[AT + 1]
    return values[:AT] + (tl.where(where, two, one), tl.where(where, one, two)) + values[AT + 2 :]


@triton.jit
def best_head(orders, ids, LIST: tl.constexpr):
    """The largest of the heads of all lists, and the lowest id that has it."""
    largest = orders[0]
    for head in tl.static_range(LIST, len(orders), LIST):
        largest = tl.maximum(largest, orders[head])
    best = tl.max(largest, 0)
    id = tl.full((32,), NOBODY, tl.int32)
    for head in tl.static_range(0, len(orders), LIST):
        id = tl.minimum(id, tl.where(orders[head] == best, ids[head], NOBODY))
    return best, tl.min(id, 0)


@triton.jit
def without_head(values, ids, id, LIST: tl.constexpr, NONE: tl.constexpr):
    """The lists ``values``, of that whose head among ``ids`` is ``id`` the others moved up, and NONE at its end."""
    left = ()
    for at in tl.static_range(len(values)):
        after = NONE if at % LIST == LIST - 1 else values[at + 1]
        left = left + (tl.where(ids[at // LIST * LIST] == id, after, values[at]),)
    return left
