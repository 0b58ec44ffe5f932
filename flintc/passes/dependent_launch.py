"""Pass 6: every launch chained to the next by programmatic dependent launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from flintc.ir.graph import Dependent, Graph, Launch
from flintc.passes.base import Pass
from flintc.passes.rule import RuleCount

#: Ops that pick rows of their weight by an index.
_GATHERS = ("embed", "expert_linear")


@dataclass(frozen=True)
class DependentLaunch(Pass):
    """Each launch starts while the one before it runs, fetches what no step writes, then waits. No launch fewer.

    Fetched above the wait: weights and tables, and of the KV cache the pages older than those this step writes. Not
    the weights of experts, which are chosen within the step. The trigger stands first, so that the next launch can
    start as early as it finds room; only the step's first launch triggers last, once its own wait has shown that
    positions and block tables are complete, since the launches after it read those above their waits.
    """

    name: ClassVar[str] = "dependent-launch"
    last: ClassVar[bool] = True

    #: Where launches after the first let their successor start.
    trigger: Literal["early", "late"] = "early"
    #: Whether anything is fetched above the wait.
    prefetch: bool = True

    def apply(self, graph: Graph) -> tuple[Graph, tuple[RuleCount, ...]]:
        """The same launches, each with its :class:`Dependent`."""
        count = RuleCount("chain", tried=len(graph.launches), matched=len(graph.launches))
        first, rest = graph.launches[:1], graph.launches[1:]
        chained = [replace(x, dependent=Dependent((), "late")) for x in first]
        chained += [replace(x, dependent=Dependent(self._fetched(graph, x), self.trigger)) for x in rest]
        return graph.with_launches(tuple(chained)), (count,)

    def _fetched(self, graph: Graph, launch: Launch) -> tuple[str, ...]:
        if not self.prefetch:
            return ()
        chosen = {_index_chosen_here(graph, o) for o in launch.ops}
        return tuple(v for v in graph.reads(launch) if v not in chosen and _stays(graph, launch, v))


def _stays(graph: Graph, launch: Launch, value: str) -> bool:
    """Whether ``value``, or the pages of it that the launch reads first, is the same all through the step."""
    kind = graph.values[value].kind
    if kind == "cache":
        return all(graph.ops[o].kind != "kv_write" for o in graph.consumers[value] if o in launch.ops)
    return kind in ("weight", "table")


def _index_chosen_here(graph: Graph, op: str) -> str | None:
    """The weight that ``op`` picks rows from by values made within the step."""
    gather = graph.ops[op]
    made = any(v in graph.producers for v in gather.inputs[:-1])
    return gather.inputs[-1] if gather.kind in _GATHERS and made else None
