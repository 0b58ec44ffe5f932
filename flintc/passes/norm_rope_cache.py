"""Pass 2: q/k norm, RoPE and the cache write as the epilogue of the qkv GEMV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintc.passes.base import FusionPass
from flintc.passes.pattern import Match, Node, op
from flintc.passes.rule import Guard, Rule, Rules, dtype, last_arriver, local

qkv = op("linear")
q_norm = op("head_norm", x=qkv)
k_norm = op("head_norm", x=qkv)

rope = op("rope", q=q_norm, k=k_norm)
write_rotated = op("kv_write", k=rope["k"], v=qkv)
write = op("kv_write", k=k_norm, v=qkv)


def every_head_once(write: Node) -> Guard:
    """q, k and v are each head of the projection exactly once, so that every program has one epilogue to run."""

    def holds(m: Match) -> bool:
        spans = [m.attr(q_norm, "heads"), m.attr(k_norm, "heads"), m.attr(write, "v_heads")]
        heads = sorted(h for s in spans if isinstance(s, tuple) for h in range(s[0], s[0] + s[1]))
        return heads == list(range(int(m.type(qkv["y"]).shape[1])))

    return Guard("q, k and v are each head of the projection once", holds)


_WHY = (
    "Heads are finished where they are made: the last program of a head to arrive norms {} all its channels. A "
    "reader of the unfinished heads elsewhere is refused: only finished ones are written. So is a cache that is not "
    "BF16, which would add a rounding that the ops do not have."
)

QKV_ROPE = Rule(
    name="qkv+norm+rope+write",
    why=_WHY.format("and rotates"),
    role="qkv",
    ops=(qkv, q_norm, k_norm, rope, write_rotated),
    crosses=(last_arriver(qkv["y"], by="head"), local(q_norm["y"]), local(k_norm["y"]), local(rope["k"])),
    guards=(dtype(write_rotated["cache"], "bf16"), every_head_once(write_rotated)),
)

QKV = Rule(
    name="qkv+norm+write",
    why=_WHY.format("(there is no RoPE on the layer)"),
    role="qkv",
    ops=(qkv, q_norm, k_norm, write),
    crosses=(last_arriver(qkv["y"], by="head"), local(k_norm["y"])),
    guards=(dtype(write["cache"], "bf16"), every_head_once(write)),
)


@dataclass(frozen=True)
class NormRopeCache(FusionPass):
    """q/k norm, RoPE and KV write become the epilogue of the qkv GEMV.

    A program computes a few rows of one head, so that the grid fills the GPU; the norm needs the whole head, hence
    the last program of each head runs the epilogue.
    """

    name: ClassVar[str] = "norm-rope-cache"
    rules: ClassVar[Rules] = QKV_ROPE + QKV
