"""How far next-token distributions are apart, and the verdict on it: KL, agreement, perplexity, a pooled ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Upper bound of the pooled ratio of two KL divergences, see docs/numerics.md.
BOUND = 1.25
#: Prompts, and tokens of each, that a verdict needs: the ratio of a few is noise.
LEAST_PROMPTS, LEAST_TOKENS = 20, 200
_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Divergence:
    """One implementation against the FP32 forward, over the positions of all prompts; KL in nats.

    by_prompt: KL summed over each prompt, in order.
    """

    mean: float
    p99: float
    largest: float
    top1: float
    perplexity: float
    by_prompt: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "kl_mean": self.mean, "kl_p99": self.p99, "kl_max": self.largest,
            "top1_agreement": self.top1, "perplexity": self.perplexity,
        }  # fmt: skip


def kl(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats at each position: f64[T] from logits [T, vocab].

    Infinite where ``other`` is no distribution (NaN or infinite logits).
    """
    p, q = (x.double().log_softmax(-1) for x in (reference, other))
    divergence = (p.exp() * (p - q)).sum(-1)
    return torch.where(divergence.isnan(), torch.inf, divergence).clamp(min=0)


class Tally:
    """Adds up a :class:`Divergence` prompt by prompt: nobody needs to hold the logits of all of them."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []
        self._lost: list[Tensor] = []

    def add(self, reference: Tensor, other: Tensor, ids: Sequence[int]) -> None:
        """One prompt of tokens ``ids``, both logits [T, vocab] on one device."""
        self._kl.append(kl(reference, other).cpu())
        self._same.append((reference.argmax(-1) == other.argmax(-1)).cpu())
        self._lost.append(losses(other, ids))

    def result(self) -> Divergence:
        """Over everything added."""
        every = torch.cat(self._kl)
        return Divergence(
            float(every.mean()),
            float(every.quantile(0.99)),
            float(every.max()),
            float(torch.cat(self._same).double().mean()),
            mean_perplexity(self._lost),
            tuple(float(x.sum()) for x in self._kl),
        )


def compare(reference: Sequence[Tensor], other: Sequence[Tensor], prompts: Sequence[Sequence[int]]) -> Divergence:
    """``other`` against ``reference``, both logits [T, vocab] per prompt."""
    tally = Tally()
    for r, o, ids in zip(reference, other, prompts, strict=True):
        tally.add(r, o, ids)
    return tally.result()


def losses(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood of each token of a prompt after the first: f64[T - 1] on the CPU."""
    following = torch.tensor(list(ids[1:]), dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(logits[:-1].double(), following, reduction="none").cpu()


def mean_perplexity(lost: Sequence[Tensor]) -> float:
    """exp of the mean of all losses; NaN where there are none."""
    every = torch.cat(list(lost))
    return float(every.mean().exp()) if len(every) else float("nan")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether flintc is as close to FP32 as another BF16 implementation.

    ratio: of the pooled KLs, flintc's over the yardstick's. upper: 95 % bootstrap bound of it. passed: None where the
    text is too short to tell.
    """

    passed: bool | None
    ratio: float
    upper: float
    reason: str


def judge(ours: Divergence, yardstick: Divergence, prompts: Sequence[Sequence[int]]) -> Verdict:
    """The pooled bound: with 95 % confidence the ratio of summed KLs does not exceed BOUND.

    Prompts are drawn again with replacement, both sums from the same draw. A KL of ours that is infinite is refused
    however little the text, since a draw may leave its prompt out.
    """
    if wrong := sum(not math.isfinite(total) for total in ours.by_prompt):
        reason = f"no finite KL from FP32 in {wrong} of {len(prompts)} prompts: logits that are NaN or infinite"
        return Verdict(False, math.inf, math.inf, reason)
    pairs = torch.tensor([ours.by_prompt, yardstick.by_prompt], dtype=torch.float64).T
    totals = pairs.sum(0)
    ratio = float(totals[0] / totals[1])
    draws = torch.randint(0, len(pairs), (_DRAWS, len(pairs)), generator=torch.Generator().manual_seed(0))
    drawn = pairs[draws].sum(1)
    ratios = (drawn[:, 0] / drawn[:, 1]).nan_to_num(torch.inf)
    lower, upper = (float(x) for x in ratios.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)))
    said = f"pooled KL {ratio:.3f} times transformers' BF16, 95 % bound {upper:.3f}"
    if len(prompts) < LEAST_PROMPTS or any(len(ids) < LEAST_TOKENS for ids in prompts):
        # So little text can still refuse a model: where even the lower bound is too high.
        needed = f"; {LEAST_PROMPTS} prompts of {LEAST_TOKENS} tokens are needed to pass"
        return Verdict(False if lower > BOUND else None, ratio, upper, said + needed)
    passed = upper <= BOUND
    return Verdict(passed, ratio, upper, f"{said}; {'at most' if passed else 'above'} {BOUND}")
