"""Choosing the next token: temperature, then top-k, then top-p, then one Philox number per row.

A row's choice depends on its own logits, parameters and position only: never on the other rows of the step, nor on
the device up to the last bits of ``exp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from flintc.errors import UsageError
from flintc.runtime.philox import uniform

#: A probability becomes a whole number of units: sums of whole numbers do not depend on their order.
#: 2^40 units for the likeliest token leave room for 2^22 tokens in 63 bits.
_UNITS = 2.0**40


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens.

    temperature: 0 takes the likeliest token (the lowest id among equals), whatever the rest says.
    top_k: keep the k likeliest tokens; 0 keeps all. top_p: of those keep the fewest that hold this share; 1 keeps all.
    seed: 64 bits; with the position of a token it determines the token's random number.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            try:
                object.__setattr__(self, name, index(getattr(self, name)))
            except TypeError:
                raise UsageError(f"{name} is {getattr(self, name)!r}: it must be a whole number") from None
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}: it must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p is {self.top_p}: it must lie above 0 and not above 1")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}: it must be 0 (off) or more")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}: it must fit 64 bits without sign")


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids: int64[B]. logprobs: float32[B], natural logarithms of the model's own probabilities of ``ids``:
    before temperature and cuts, over the ids that may be sampled."""

    ids: Tensor
    logprobs: Tensor


def _sort_keys(logits: Tensor) -> Tensor:
    """int64 keys, all different, that ascend with the logit and, among equal logits, descend with the id."""
    bits = (logits + 0.0).contiguous().view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (ascending << 32) | (0xFFFFFFFF - ids)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _units(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights int64[B, K] of ``logits`` (best first) in whole units, zero where top-k or top-p cut them."""
    temperature = _column([p.temperature or 1.0 for p in params], logits)
    scaled = logits.double()
    weights = (torch.exp((scaled - scaled[:, :1]) / temperature) * _UNITS).round().long()
    top_k = _column([p.top_k or logits.shape[1] for p in params], logits)
    weights = weights * (torch.arange(logits.shape[1], device=logits.device) < top_k)
    before = weights.cumsum(1) - weights
    top_p = _column([p.top_p for p in params], logits)
    kept = (before < top_p * weights.sum(1, keepdim=True)) | (top_p == 1.0)
    return weights * kept


def _candidates(params: Sequence[SamplingParams], vocab: int) -> int:
    """How many of the likeliest tokens any row can need."""
    wanted = (1 if p.temperature == 0.0 else p.top_k or vocab for p in params)
    return min(max(wanted), vocab)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], vocab: int | None = None
) -> Sampled:
    """One token per row.

    logits: float32[B, V]. params, positions: one per row; ``positions[i]`` is the position that the chosen token
    will take. vocab: ids from there on are padding and are never chosen (None: all V may be).
    """
    allowed = logits if vocab is None else logits[:, :vocab]
    keys = torch.topk(_sort_keys(allowed), _candidates(params, allowed.shape[1])).values
    order = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
    total = _units(allowed.gather(1, order), params).cumsum(1)
    seeds = [p.seed - 2**64 if p.seed >= 2**63 else p.seed for p in params]
    numbers = uniform(
        torch.tensor(seeds, dtype=torch.int64, device=logits.device),
        torch.tensor(positions, dtype=torch.int64, device=logits.device),
    )
    greedy = torch.tensor([p.temperature == 0.0 for p in params], device=logits.device)
    target = (numbers * total[:, -1].double()).floor().long().masked_fill(greedy, 0)
    ids = order.gather(1, torch.searchsorted(total, target[:, None], right=True))
    logprobs = torch.log_softmax(allowed.double(), 1).gather(1, ids)
    return Sampled(ids[:, 0], logprobs[:, 0].float())
