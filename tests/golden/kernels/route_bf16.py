"""Norm of a row, its expert logits, and the choice of experts.

Ops:
  add: sum stays FP32; residual = bf16(sum)
  norm: bf16(x * rsqrt(mean(x^2) + eps) * w)
  router: FP32 weights, FP32 logits
  topk: FP32

Bound: EXPERTS=256, WIDTH=2048, BLOCK=2048, TILE=4, WARPS=4, EPS=1e-06, CHOSEN=6, SOFTMAX=False, RENORMALIZE=True
"""

import triton
import triton.language as tl


NOBODY: tl.constexpr = tl.constexpr(0x7FFFFFFF)


NO_ORDER: tl.constexpr = tl.constexpr(-(1 << 31))


INTERPRET: tl.constexpr = tl.constexpr(False)


@triton.jit
def arrive_last(counter_ptr, group):
    """True in exactly one of ``group`` programs: the last to get here. It then sees all stores before their calls.

    The last program puts the counter back to zero, so that a replay of the launch needs no reset.
    """
    # Every thread's stores must precede the one atomic that publishes them.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == group - 1
    if last:
        tl.store(counter_ptr, 0)
    # The last program's other threads may load only after the acquire.
    tl.debug_barrier()
    return last


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
def logit_of(order):
    """The logit of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_of(logits):
    """int32 that ascends with the logit; both zeros are equal."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    # Negative floats sort backwards by their bits: flip all but the sign.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def exchanged(values, AT: tl.constexpr, where):
    """The tuple ``values``, those at AT and after it in each other's place ``where`` (bool) that is so."""
    one, two = values[AT], values[AT + 1]
    return values[:AT] + (tl.where(where, two, one), tl.where(where, one, two)) + values[AT + 2 :]


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
def without_head(values, ids, id, LIST: tl.constexpr, NONE: tl.constexpr):
    """The lists ``values``, of that whose head among ``ids`` is ``id`` the others moved up, and NONE at its end."""
    left = ()
    for at in tl.static_range(len(values)):
        after = NONE if at % LIST == LIST - 1 else values[at + 1]
        left = left + (tl.where(ids[at // LIST * LIST] == id, after, values[at]),)
    return left


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
def release_dependents():
    """Let the next launch start. Publishes nothing: the next launch's wait does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rms_scale(x, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """rsqrt(mean(x^2) + eps) over all of x, FP32; elements past WIDTH are zero."""
    return tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)


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
def add_neighbours(x):
    """Neighbours along the last of three axes added: half as many."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return even + odd


@triton.jit
def add_all(x):
    """Sum over the last of three axes (at most 16), as a fixed tree: [A, B, 1].

    Asked to ``split`` that axis, the compiler gives each thread all of it at once, in one exchange through shared
    memory. A reduction between warps would take three, with up to 8 lanes at a bank.
    """
    if x.shape[2] > 8:
        x = add_neighbours(x)
    if x.shape[2] > 4:
        x = add_neighbours(x)
    if x.shape[2] > 2:
        x = add_neighbours(x)
    if x.shape[2] > 1:
        x = add_neighbours(x)
    return x


@triton.jit
def sum_columns(x, WARPS: tl.constexpr):
    """Sums of the rows of x [ROWS, COLUMNS] whose columns WARPS warps hold in turn, four to a thread: [ROWS].

    Within the warps first, and between them by :func:`add_all`, in one exchange.
    """
    LANES: tl.constexpr = 128 if x.shape[1] >= WARPS * 128 else x.shape[1] // WARPS
    x = tl.reshape(x, (x.shape[0], x.shape[1] // (WARPS * LANES), WARPS, LANES))
    return tl.reshape(add_all(tl.sum(tl.sum(x, 1), 2)[:, None, :]), (x.shape[0],))


@triton.jit
def wait_for_producers():
    """Block until every launch before this one has finished and its stores are visible."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def route_256x2048_add(
    x_ptr,
    residual_ptr,
    norm_ptr,
    router_ptr,
    seqs_ptr,
    residual_out_ptr,
    h_ptr,
    logits_ptr,
    ids_ptr,
    mix_ptr,
    arrivals_ptr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    EPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Norm of a row, its expert logits, and the choice of experts."""
    release_dependents()
    row = tl.program_id(1)
    expert = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    seq = tl.load(seqs_ptr + row)
    weights = tl.load(
        router_ptr + expert[:, None] * WIDTH + column[None, :],
        mask=(expert < EXPERTS)[:, None] & inside[None, :],
        other=0.0,
    )
    gain = tl.load(norm_ptr + column, mask=inside, other=0.0)
    # Above: nothing that this step writes. Below: what its launches have made.
    wait_for_producers()
    # Four neighbours to a thread, as it holds the weights: so what it makes of the row is where it is needed.
    at = tl.max_contiguous(row * WIDTH + column, 4)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # Every program norms the row for itself; the norm reads the unrounded sum.
    h = round_bf16(x * rms_scale(x, WIDTH, EPS) * gain)
    if tl.program_id(0) == 0:
        tl.store(residual_out_ptr + at, round_bf16(x), mask=inside)
        tl.store(h_ptr + at, h, mask=inside)
    logits = sum_columns(weights * h.to(tl.float32)[None, :], WARPS)
    tl.store(logits_ptr + row * EXPERTS + expert, logits, mask=expert < EXPERTS)
    # The last program of the row finds all its logits.
    if arrive_last(arrivals_ptr + row, tl.num_programs(0)):
        ids, mix = choose(logits_ptr + row * EXPERTS, EXPERTS, CHOSEN, SOFTMAX, RENORMALIZE)
        rank = tl.arange(0, ids.shape[0])
        # A padded row chooses no expert.
        tl.store(ids_ptr + row * CHOSEN + rank, tl.where(seq >= 0, ids, -1), mask=rank < CHOSEN)
        tl.store(mix_ptr + row * CHOSEN + rank, tl.where(seq >= 0, mix, 0.0), mask=rank < CHOSEN)
