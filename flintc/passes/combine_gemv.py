"""Pass 5: the down GEMVs with the weighted combine and the shared add; dense gate/up with SiLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintc.passes.base import FusionPass
from flintc.passes.pattern import op
from flintc.passes.rule import Rule, Rules, local, rank, same_dtype

expert_down = op("expert_linear")
combine = op("combine", y=expert_down)
shared_down = op("linear")
total = op("sum", a=combine, b=shared_down)

gate_up = op("linear")
silu = op("silu_mul", gate_up=gate_up)

_DOWN_WHY = (
    "A program makes a few columns of every chosen expert{} and adds them up in registers, in rank order. Another "
    "reader of a part is refused: only the total is written. Experts that share one row are refused: down reads each "
    "expert's own activation."
)

DOWN_SHARED = Rule(
    name="expert and shared down+combine+add",
    why=_DOWN_WHY.format(" and of the shared one") + " Weights of two formats are refused: one launch unpacks one.",
    role="expert_down",
    ops=(expert_down, combine, total, shared_down),
    crosses=(local(expert_down["y"]), local(combine["y"]), local(shared_down["y"])),
    guards=(rank(expert_down["x"], 3), same_dtype(expert_down["weight"], shared_down["weight"])),
)

DOWN = Rule(
    name="expert down+combine",
    why=_DOWN_WHY.format(""),
    role="expert_down",
    ops=(expert_down, combine),
    crosses=(local(expert_down["y"]),),
    guards=(rank(expert_down["x"], 3),),
)

GATE_UP = Rule(
    name="dense gate/up+silu",
    why="Each program holds gate and up of its columns. A projection viewed as heads is refused: its halves would lie "
    "within each head. Another reader of the product is refused: only the activation is written.",
    role="gate_up",
    ops=(gate_up, silu),
    crosses=(local(gate_up["y"]),),
    guards=(rank(gate_up["y"], 2),),
)


@dataclass(frozen=True)
class CombineGemv(FusionPass):
    """Down GEMVs, weighted combine and shared add share a launch; in a dense MLP SiLU·mul joins gate/up.

    The combine joins the GEMV it follows: a sum of a few products per column costs nothing there, while the next GEMV
    would need it in every program.
    """

    name: ClassVar[str] = "combine-gemv"
    rules: ClassVar[Rules] = DOWN_SHARED + DOWN + GATE_UP
