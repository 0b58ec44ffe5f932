"""What a step makes of its padded rows: those of no sequence, which nothing reads."""

from __future__ import annotations

import torch
from torch import Tensor

from flintc.ir.graph import Graph


def check_padded(graph: Graph, name: str, got: Tensor, want: Tensor) -> None:
    """Padded rows of a value against the reference's: equal where a row is -1 (no expert) or 0 (no expert read,
    nothing attended to) throughout. Partials of attention are not written at all, other values are of no concern.
    """
    if graph.ops[graph.producers[name]].kind == "attention_partial":
        return
    for row, expected in zip(got, want, strict=True):
        if (expected == expected.flatten()[0]).all():
            assert torch.equal(row, expected), f"{name}: a padded row is not {expected.flatten()[0]}"
