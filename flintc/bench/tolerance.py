"""How far a launch may be from the reference: a stated number of BF16 steps at the size of the row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.ops import OPS
from flintc.reference import Nvfp4, run_launch

Values = Mapping[str, Tensor | Nvfp4]
#: A rounded probability is off by at most 2**-9 of itself; two sides round it at different running maxima.
_PROBABILITY = 2.0**-8
_ATTENTION = ("attention", "attention_partial", "attention_merge")


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst value of one comparison; ``excess`` is error / allowed, above 1 where the bound is broken."""

    value: str
    excess: float
    error: float
    allowed: float
    place: tuple[int, ...]
    got: float
    want: float
    wrong: int
    count: int

    @property
    def passed(self) -> bool:
        """Whether every value is within its bound."""
        return self.wrong == 0

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        numbers = {k: getattr(self, k) for k in ("excess", "error", "allowed", "got", "want")}
        return {
            "value": self.value, "place": list(self.place), "wrong": self.wrong, "count": self.count, **numbers,
        }  # fmt: skip


def bf16_step(size: Tensor) -> Tensor:
    """Distance between neighbouring BF16 numbers at ``size`` (positive), FP32."""
    _, exponent = torch.frexp(size.float())
    return torch.ldexp(torch.ones_like(size, dtype=torch.float32), exponent - 8)


def allowed(want: Tensor, roundings: int) -> Tensor:
    """``roundings`` BF16 steps at max(|want|, rms(row) / 256), a row being the last axis.

    One step of a value near zero is far below what two orders of a long FP32 sum differ by: hence the row's size.
    """
    wide = want.float()
    floor = wide.square().nanmean(-1, keepdim=True).sqrt() / 256
    size = torch.maximum(wide.abs(), floor.nan_to_num(0.0)).clamp(min=torch.finfo(torch.float32).tiny)
    return roundings * bf16_step(size)


def roundings(graph: Graph, ops: Collection[str], known: Collection[str] = ()) -> dict[str, int]:
    """Chained roundings between what ``ops`` read of others, or of the values ``known``, and each value they make.

    At least one: two FP32 orders of a sum differ as well.
    """
    depth: dict[str, int] = {}
    for op in graph.ops.values():
        if op.name not in ops:
            continue
        before = max((depth.get(v, 0) for v in op.inputs if v not in known), default=0)
        copies = OPS[op.kind].rounding.startswith("none")
        for value in op.outputs:
            depth[value] = before + (graph.values[value].type.dtype == "bf16" and not copies)
    return {value: max(1, n) for value, n in depth.items()}


def difference(name: str, got: Tensor, want: Tensor, limit: Tensor) -> Difference:
    """Compare two tensors; what is NaN on both sides (never written) is equal."""
    error = (got.float() - want.float()).abs()
    unwritten = got.isnan() & want.isnan() if got.is_floating_point() else torch.zeros_like(error, dtype=torch.bool)
    equal = unwritten | (got == want)
    excess = torch.where(equal, 0.0, error / limit).nan_to_num(torch.inf)
    at = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
    return Difference(
        name, float(excess.flatten()[at]), float(error[place]), float(limit[place]), place,
        float(got[place]), float(want[place]), int((excess > 1).sum()), got.numel(),
    )  # fmt: skip


def compare_value(
    graph: Graph, launch: Launch, name: str, got: Tensor, values: Values, depth: Mapping[str, int]
) -> Difference:
    """One value that ``launch`` made against the same value among ``values``, under the bound of its op.

    ``values`` holds what the launch reads as well. depth: as of :func:`roundings`, of the value and of what it is made
    of where that is not the same on both sides. Chosen experts are compared by their logits: between two of equal score
    either may be chosen. A padded row chooses none.
    """
    want, rounds = values[name], depth[name]
    assert isinstance(want, Tensor)
    op = graph.ops[graph.producers[name]]
    if op.kind == "topk" and got.dtype == torch.int32:
        logits = values[op.inputs[0]]
        assert isinstance(logits, Tensor)
        chosen, wanted = (_logits_of(logits, ids) for ids in (got, want))
        return difference(name, chosen, wanted, allowed(logits, rounds).amin(-1, keepdim=True).expand_as(wanted))
    if not want.is_floating_point():
        return difference(name, got, want, torch.full(want.shape, 0.5, device=want.device))
    limit = allowed(want, rounds)
    if op.kind in _ATTENTION:
        limit = limit + probability_slack(graph, launch, op, name, values)
    elif op.kind == "sum":
        limit = limit + _slack_of_terms(op, values, depth)
    return difference(name, got, want, limit)


def _slack_of_terms(op: Op, values: Values, depth: Mapping[str, int]) -> Tensor | float:
    """What rounded terms add to their sum: steps at their own sizes, which may be far above that of the sum."""
    terms = {name: values[name] for name in op.inputs if depth.get(name, 0)}
    return sum((allowed(t, depth[name]) for name, t in terms.items() if isinstance(t, Tensor)), start=0.0)


def _logits_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits [B, k] of the experts ``ids``; NaN for what is no expert."""
    inside = (ids >= 0) & (ids < logits.shape[1])
    return logits.gather(1, ids.clamp(0, logits.shape[1] - 1).long()).masked_fill(~inside, torch.nan)


def probability_slack(graph: Graph, launch: Launch, op: Op, name: str, values: Values) -> Tensor | float:
    """What the tiling of attention may add to a value: every probability rounded at another running maximum.

    That is a share of the sum of p * |v|, which is the same launch run on the magnitudes of the cached values.
    """
    if op.kind == "attention_partial" and name != op.outputs[0]:
        return 0.0
    attention = tuple(o for o in launch.ops if graph.ops[o].kind in _ATTENTION)
    given = dict(values)
    for value in graph.reads(launch):
        tensor = given.get(value)
        if graph.values[value].kind == "cache" and isinstance(tensor, Tensor):
            given[value] = torch.stack((tensor[:, 0], tensor[:, 1].abs()), 1)
    whole = run_launch(graph, replace(launch, ops=attention), given)
    return _PROBABILITY * whole[name].float().nan_to_num(0.0)
