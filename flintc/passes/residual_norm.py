"""Pass 1: the residual add and the norm that reads its sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintc.passes.base import FusionPass
from flintc.passes.pattern import op
from flintc.passes.rule import Rule, Rules, local, rank

add = op("add")
norm = op("norm", x=add["sum"])

ADD_NORM = Rule(
    name="add+norm",
    why="The norm reads the unrounded sum from registers; the FP32 row never goes to memory. Another reader of the "
    "sum is refused, since the row would have to be written for it after all. A norm of the rounded residual is "
    "another function and no match.",
    role="add_norm",
    ops=(add, norm),
    crosses=(local(add["sum"]),),
    guards=(rank(add["sum"], 2),),
)


@dataclass(frozen=True)
class ResidualNorm(FusionPass):
    """Residual add and RMSNorm share a launch: one program per row holds the whole row."""

    name: ClassVar[str] = "residual-norm"
    rules: ClassVar[Rules] = Rules((ADD_NORM,))
