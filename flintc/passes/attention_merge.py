"""Pass 3: split-KV partials and their merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintc.passes.base import FusionPass
from flintc.passes.pattern import given, op
from flintc.passes.rule import Rule, Rules, last_arriver, same_attrs

positions, seqs = given("positions"), given("seqs")

partial = op("attention_partial", positions=positions, seqs=seqs)
merge = op(
    "attention_merge", o=partial["o"], m=partial["m"], l=partial["l"], positions=positions, seqs=seqs
)  # fmt: skip

PARTIAL_MERGE = Rule(
    name="partial+merge",
    why="The last splits of a head to arrive merge all of them, the sink counted once. The merge must know which "
    "splits a row has, so it must agree with the partials on chunks, window and positions. Another reader of a partial "
    "is refused: partials of splits that a row does not have are never written.",
    role="attention",
    ops=(partial, merge),
    crosses=tuple(last_arriver(partial[port], by="row-head") for port in ("o", "m", "l")),
    guards=(same_attrs(partial, merge, "chunk", "window", "partials"),),
)


@dataclass(frozen=True)
class AttentionMerge(FusionPass):
    """The split-KV partials and their merge share a launch."""

    name: ClassVar[str] = "attention-merge"
    rules: ClassVar[Rules] = Rules((PARTIAL_MERGE,))
