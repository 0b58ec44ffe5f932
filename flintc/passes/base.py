"""What a pass is: a frozen dataclass whose fields are its options."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flintc.ir.graph import Graph
from flintc.passes.fuse import fuse
from flintc.passes.rule import RuleCount, Rules, search


@dataclass(frozen=True)
class Pass(ABC):
    """One step of the pipeline: a graph in, the same ops under another partition or better scheduled out.

    Subclasses set ``name``; ``requires``, passes that must have run before; and ``last`` where the pass says something
    of each launch that would be lost if launches were changed after it: only passes that name it in ``keeps``, and so
    say it again, may follow.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    last: ClassVar[bool] = False
    keeps: ClassVar[tuple[str, ...]] = ()

    @property
    def doc(self) -> str:
        """What the pass is for."""
        return inspect.getdoc(type(self)) or ""

    @abstractmethod
    def apply(self, graph: Graph) -> tuple[Graph, tuple[RuleCount, ...]]:
        """The new graph, and what became of each rule."""


@dataclass(frozen=True)
class FusionPass(Pass):
    """A pass that joins launches where one of its ``rules`` matches."""

    rules: ClassVar[Rules]

    #: Output rows per program of the launches it forms; None keeps what their matrix products had.
    tile: int | None = None

    def apply(self, graph: Graph) -> tuple[Graph, tuple[RuleCount, ...]]:
        """Join every match of the rules, earlier rules first; a match that would close a cycle is refused."""
        found, counts = search(graph, self.rules)
        fused, dropped = fuse(graph, found, self.tile)
        by_rule = {count.rule: count for count in counts}
        for f in dropped:
            by_rule[f.rule.name].matched -= 1
            by_rule[f.rule.name].refused["its launch would wait for itself"] += 1
        return fused, tuple(counts)
