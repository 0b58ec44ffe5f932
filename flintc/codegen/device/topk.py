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
def choose(logits, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SOFTMAX: tl.constexpr, RENORMALIZE: tl.constexpr):
    """The CHOSEN largest of each row of logits (FP32 [ROWS, >= EXPERTS]), best first, ties to the lowest index.

    Returns ids int32 and weights FP32, [ROWS, power of two >= CHOSEN]; columns past CHOSEN hold 0.
    """
    index = tl.arange(0, logits.shape[1])[None, :]
    rank = tl.arange(0, triton.next_power_of_2(CHOSEN))[None, :]
    keys = tl.where(index < EXPERTS, choice_key(logits, index), NO_KEY)
    chosen = tl.full((logits.shape[0], rank.shape[1]), NO_KEY, tl.int64)
    for r in tl.static_range(CHOSEN):
        best = tl.max(keys, 1)[:, None]
        chosen = tl.where(rank == r, best, chosen)
        keys = tl.where(keys == best, NO_KEY, keys)
    taken = rank < CHOSEN
    score = tl.where(taken, key_logit(chosen), 0.0)
    if SOFTMAX:
        # The best logit is the largest: no second maximum is needed.
        top = tl.max(tl.where(taken, score, float("-inf")), 1)[:, None]
        total = tl.sum(tl.where(index < EXPERTS, tl.exp(logits - top), 0.0), 1)[:, None]
        weight = tl.exp(score - top) / total
    else:
        weight = 1.0 / (1.0 + tl.exp(-score))
    weight = tl.where(taken, weight, 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 1)[:, None] + 1e-20)
    return tl.where(taken, key_index(chosen), 0), weight
