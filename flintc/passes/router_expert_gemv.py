"""Pass 4: the router with its norm and top-k, and the gate/up GEMVs with their SiLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintc.passes.base import FusionPass
from flintc.passes.pattern import given, op
from flintc.passes.rule import Rule, Rules, last_arriver, local, rank, recompute, same_dtype

add = op("add")
add_norm = op("norm", x=add["sum"])
add_router = op("router", x=add_norm)
add_topk = op("topk", logits=add_router)

norm = op("norm")
router = op("router", x=norm)
topk = op("topk", logits=router)

h = given("h")
expert_gate_up = op("expert_linear", x=h)
expert_silu = op("silu_mul", gate_up=expert_gate_up)
shared_gate_up = op("linear", x=h)
shared_silu = op("silu_mul", gate_up=shared_gate_up)

_ROUTE_WHY = (
    "Every program norms the row again, which is cheap, and scores a few experts; the last one to arrive chooses. The "
    "normed row is written besides, for the GEMVs that follow. Another reader of the logits is refused: they are "
    "complete only once the last of the row's programs has arrived."
)

ADD_ROUTE = Rule(
    name="add+norm+router+topk",
    why=_ROUTE_WHY,
    role="route",
    ops=(add, add_norm, add_router, add_topk),
    crosses=(
        local(add["sum"]),
        recompute(add_norm["y"], kept=True),
        last_arriver(add_router["logits"], by="row"),
    ),
)

ROUTE = Rule(
    name="norm+router+topk",
    why=_ROUTE_WHY,
    role="route",
    ops=(norm, router, topk),
    crosses=(recompute(norm["y"], kept=True), last_arriver(router["logits"], by="row")),
)

EXPERTS_SHARED = Rule(
    name="expert and shared gate/up+silu",
    why="The chosen experts and the shared one read the same row, and each program holds gate and up of its columns. "
    "Weights of two formats are refused: one launch unpacks one. Another reader of a gate/up product is refused: only "
    "its activation is written.",
    role="expert_gate_up",
    ops=(expert_gate_up, expert_silu, shared_gate_up, shared_silu),
    crosses=(local(expert_gate_up["y"]), local(shared_gate_up["y"])),
    guards=(same_dtype(expert_gate_up["weight"], shared_gate_up["weight"]),),
)

EXPERTS = Rule(
    name="expert gate/up+silu",
    why="The same without a shared expert. Experts that each read a row of their own are refused: a program then has "
    "another row for every rank.",
    role="expert_gate_up",
    ops=(expert_gate_up, expert_silu),
    crosses=(local(expert_gate_up["y"]),),
    guards=(rank(expert_gate_up["x"], 2),),
)


@dataclass(frozen=True)
class RouterExpertGemv(FusionPass):
    """Norm, router and top-k share a launch; gate/up of the chosen and the shared experts, with SiLU·mul, another.

    Only the chosen experts' weights are read.
    """

    name: ClassVar[str] = "router-expert-gemv"
    rules: ClassVar[Rules] = ADD_ROUTE + ROUTE + EXPERTS_SHARED + EXPERTS
