"""How far a kernel may be from its reference: a stated number of BF16 steps at the size of the row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flintc.bench.tolerance import probability_slack
from flintc.ir.graph import Graph, Launch
from flintc.reference.nvfp4 import Nvfp4


def bf16_ulp(size: Tensor) -> Tensor:
    """Distance between neighbouring BF16 values at ``size`` (positive), FP32."""
    _, exponent = torch.frexp(size.float())
    return torch.ldexp(torch.ones_like(size, dtype=torch.float32), exponent - 8)


def allowed(reference: Tensor, roundings: int, size: Tensor | None = None) -> Tensor:
    """``roundings`` BF16 steps at max(size, rms(row) / 256); a row is the last axis, ``size`` |reference| by default.

    One step of a value near zero is far below what two orders of a long FP32 sum differ by: hence the row's size.
    """
    wide = reference.float()
    floor = wide.square().mean(-1, keepdim=True).sqrt() / 256
    size = torch.maximum(wide.abs() if size is None else size, floor).clamp(min=torch.finfo(torch.float32).tiny)
    return roundings * bf16_ulp(size)


def assert_close(
    got: Tensor, reference: Tensor, roundings: int = 1, slack: Tensor | float = 0.0, size: Tensor | None = None
) -> None:
    """``got`` equals ``reference`` up to ``roundings`` BF16 steps (2 where roundings are chained), NaN nowhere.

    ``slack`` is what a kernel's tiling may add, derived from the inputs; ``size`` is where a step is taken, if that is
    not the value itself.
    """
    assert got.shape == reference.shape, f"{list(got.shape)} instead of {list(reference.shape)}"
    error = (got.float() - reference.float()).abs()
    limit = allowed(reference, roundings, size) + slack
    wrong = ~(error <= limit)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} values are off; first at {list(at)}: {got[at].item()} instead of "
            f"{reference[at].item()} (allowed {limit[at].item():.3g})"
        )


def rounded_probabilities(
    graph: Graph, launch: Launch, name: str, values: Mapping[str, Tensor | Nvfp4]
) -> Tensor | float:
    """What the tiling may add to ``name`` where ``launch`` attends to the whole context: 2^-8 of the sum of p * |v|.

    Its kernel rounds a probability by the maximum that a warp has seen so far of a run of chunks, the reference by that
    of the chunk. values: all that the launch reads.
    """
    first = graph.ops[launch.ops[0]]
    if first.kind != "attention_partial" or first.attrs["window"] is not None:
        return 0.0
    return probability_slack(graph, launch, graph.ops[graph.producers[name]], name, values)
