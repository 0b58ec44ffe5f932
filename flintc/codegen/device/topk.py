"""The k best experts of each row and their weights."""

import triton
import triton.language as tl

#: Below the key of every logit.
NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def choice_key(logit, index):
    """int64 key: a larger logit has the larger key, and of equal logits the lower index. Holds both exactly."""
    # -0.0 equals 0.0, but its bits do not.
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    # Negative floats sort backwards by their bits: flip all but the sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_index(key):
    """The index in a key, int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_logit(key):
    """The logit in a key, FP32."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
    keys = ()
    for first in tl.static_range(0, EXPERTS, 32):
        index = first + lane
        logit = tl.zeros((32,), tl.float32)
        for part in tl.static_range(PARTS - 1, -1, -1):
            logit += tl.load(logits_ptr + part * EXPERTS + index, mask=index < EXPERTS, other=0.0)
        keys = keys + (tl.where(index < EXPERTS, choice_key(logit, index), NO_KEY),)
    rank = tl.arange(0, triton.next_power_of_2(CHOSEN))
    chosen = tl.full(rank.shape, NO_KEY, tl.int64)
    best = ~NO_KEY
    for r in tl.static_range(CHOSEN):
        left = tl.full((32,), NO_KEY, tl.int64)
        for group in tl.static_range(len(keys)):
            left = tl.maximum(left, tl.where(keys[group] < best, keys[group], NO_KEY))
        best = tl.max(left, 0)
        chosen = tl.where(rank == r, best, chosen)
    taken = rank < CHOSEN
    score = tl.where(taken, key_logit(chosen), 0.0)
    if SOFTMAX:
        # The best logit is the largest: no second maximum is needed.
        top = tl.max(tl.where(taken, score, float("-inf")), 0)
        terms = tl.zeros((32,), tl.float32)
        for group in tl.static_range(len(keys)):
            terms += tl.where(keys[group] != NO_KEY, tl.exp(key_logit(keys[group]) - top), 0.0)
        weight = tl.exp(score - top) / tl.sum(terms, 0)
    else:
        weight = 1.0 / (1.0 + tl.exp(-score))
    weight = tl.where(taken, weight, 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    return tl.where(taken, key_index(chosen), 0), weight
