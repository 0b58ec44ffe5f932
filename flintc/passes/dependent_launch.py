"""Pass 6: every launch chained to the next by programmatic dependent launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flintc.ir.graph import Dependent, Graph, Launch, Trigger
from flintc.passes.base import Pass
from flintc.passes.rule import RuleCount

#: Ops that pick rows of their weight by an index.
_GATHERS = ("embed", "expert_linear")


@dataclass(frozen=True)
class DependentLaunch(Pass):
    """Each launch starts while the one before it runs, fetches what no step writes, then waits. No launch fewer.

    Fetched above the wait: weights and tables, and of the KV cache the first positions that a launch reads, but for
    those that this step writes. Not the weights of experts, which are chosen within the step. The trigger stands first,
    so that the next launch can start as early as it finds room; only the step's first launch triggers last, once its
    own wait has shown that positions and block tables are complete, since the launches after it read those above their
    waits.

    In steps of one row, a launch of a role in ``ahead`` fetches its experts above the wait too, where they were chosen
    before the launch before it: that one triggers below its wait, when the choice is sure to be made. Of several rows
    the programs are too many to all be there when the wait ends, and a late trigger costs more than it gives.
    """

    name: ClassVar[str] = "dependent-launch"
    last: ClassVar[bool] = True

    #: Where launches after the first let their successor start.
    trigger: Trigger = "early"
    #: Whether anything is fetched above the wait.
    prefetch: bool = True
    #: Roles whose experts are fetched ahead of the wait in steps of one row.
    ahead: tuple[str, ...] = ("expert_down",)

    def apply(self, graph: Graph) -> tuple[Graph, tuple[RuleCount, ...]]:
        """The same launches, each with its :class:`Dependent`."""
        count = RuleCount("chain", tried=len(graph.launches), matched=len(graph.launches))
        first, rest = graph.launches[:1], graph.launches[1:]
        chained = [replace(x, dependent=Dependent((), "late")) for x in first]
        chained += [replace(x, dependent=Dependent(self._fetched(graph, x), self.trigger)) for x in rest]
        for at in range(2, len(chained)):
            chained[at - 1 : at + 1] = self._ahead(graph, chained[at - 1], chained[at])
        return graph.with_launches(tuple(chained)), (count,)

    def _ahead(self, graph: Graph, before: Launch, launch: Launch) -> tuple[Launch, Launch]:
        """Two launches in a row, chained for one row so that the second fetches its experts ahead of its wait."""
        assert launch.dependent is not None and before.dependent is not None
        own, first = launch.dependent.of_one_row, before.dependent.of_one_row
        given = {v for o in before.ops for v in graph.ops[o].outputs}
        chosen = dict.fromkeys(v for o in launch.ops for v in _choice(graph, o))
        if launch.role not in self.ahead or not self.prefetch or not chosen or not given.isdisjoint(chosen):
            return before, launch
        if first.trigger == "early":
            before = replace(before, dependent=replace(before.dependent, alone=replace(first, trigger="waited")))
        fetched = tuple(v for v in graph.reads(launch) if v in own.prefetch or v in chosen)
        return before, replace(launch, dependent=replace(launch.dependent, alone=replace(own, prefetch=fetched)))

    def _fetched(self, graph: Graph, launch: Launch) -> tuple[str, ...]:
        if not self.prefetch:
            return ()
        chosen = {_index_chosen_here(graph, o) for o in launch.ops}
        return tuple(v for v in graph.reads(launch) if v not in chosen and _stays(graph, launch, v))


def _stays(graph: Graph, launch: Launch, value: str) -> bool:
    """Whether ``value``, or what earlier steps wrote of it, is the same all through the step."""
    kind = graph.values[value].kind
    if kind == "cache":
        return all(graph.ops[o].kind != "kv_write" for o in graph.consumers[value] if o in launch.ops)
    return kind in ("weight", "table")


def _choice(graph: Graph, op: str) -> tuple[str, ...]:
    """Of the inputs of ``op``, the choice of experts and what it decides about: ids, shares, the experts' weights."""
    weight = _index_chosen_here(graph, op)
    return tuple(v for v in graph.ops[op].inputs if v == weight or _is_choice(graph, v))


def _is_choice(graph: Graph, value: str) -> bool:
    made = graph.producers.get(value)
    return made is not None and graph.ops[made].kind == "topk"


def _index_chosen_here(graph: Graph, op: str) -> str | None:
    """The weight that ``op`` picks rows from by values made within the step."""
    gather = graph.ops[op]
    made = any(v in graph.producers for v in gather.inputs[:-1])
    return gather.inputs[-1] if gather.kind in _GATHERS and made else None
