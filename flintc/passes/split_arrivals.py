"""Pass 7: where a launch goes on with the last program to arrive, the rest becomes a launch of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from flintc.ir.graph import Graph, Launch
from flintc.passes.base import Pass
from flintc.passes.dependent_launch import DependentLaunch
from flintc.passes.fuse import unused_name
from flintc.passes.rule import RuleCount

#: Role of a launch that has a last arriver -> the role of what stands before the arrival, and of what comes after it.
ROLES: Mapping[str, tuple[str, str]] = {
    "qkv": ("linear", "heads"),
    "attention": ("attention_partial", "attention_merge"),
    "route": ("route", "topk"),
}


@dataclass(frozen=True)
class SplitArrivals(Pass):
    """A launch that its last arriver finishes is cut at the arrival: two dependent launches in place of one.

    Under dependent launch a launch that waits for another costs less than a program that waits for others: the
    hardware tells the next launch that all programs have stored what they made in 0.4 us, while a fence, an arrival
    at a counter and a load take three trips to L2. Without dependent launch it is the other way round. So this is what
    joining launches comes to on a GPU that has it, measured in docs/benchmarks.md, and what is not chained stays whole.

    A launch that streams many weights is left whole: most of its groups arrive while others still load.
    """

    name: ClassVar[str] = "split-arrivals"
    last: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = ("dependent-launch",)

    #: Bytes of weights from which on a launch is left whole. On an H200 one that reads 6 MB gains by the cut, one that
    #: reads 21 MB loses.
    streams: int = 8 << 20
    #: How the launches are chained once there are more of them: to be given as the pass before, if with other options.
    chain: DependentLaunch = field(default_factory=DependentLaunch)

    def apply(self, graph: Graph) -> tuple[Graph, tuple[RuleCount, ...]]:
        """The graph with every such launch cut, all launches chained again."""
        counts = {role: RuleCount(f"{role} at its arrival") for role in ROLES}
        names = {launch.name for launch in graph.launches}
        launches: list[Launch] = []
        for launch in graph.launches:
            arriving = {c.value for c in launch.crossings if c.kind == "last-arriver"}
            if launch.role not in ROLES or not arriving:
                launches.append(launch)
                continue
            count = counts[launch.role]
            count.tried += 1
            if (refusal := self._refusal(graph, launch)) is not None:
                count.refused[refusal] += 1
                launches.append(launch)
                continue
            count.matched += 1
            launches += _cut(graph, launch, arriving, names)
            names.add(launches[-1].name)
        if len(launches) > len(graph.launches):
            graph, _ = self.chain.apply(graph.with_launches(tuple(launches)))
        return graph, tuple(counts.values())

    def _refusal(self, graph: Graph, launch: Launch) -> str | None:
        """Why ``launch`` stays whole; None if it is cut."""
        if launch.dependent is None:
            return "it is not chained to the launch before"
        if _weight_bytes(graph, launch) >= self.streams:
            return "it streams its weights for longer than arrivals take"
        return None


def _weight_bytes(graph: Graph, launch: Launch) -> int:
    values = (graph.values[v] for v in graph.reads(launch))
    return sum(v.type.nbytes({}) for v in values if v.kind == "weight")


def _cut(graph: Graph, launch: Launch, arriving: set[str], names: set[str]) -> tuple[Launch, Launch]:
    """The two launches: all that the values ``arriving`` are made of, and all that is made of them.

    The second gets a name that is not among ``names``.
    """
    after: set[str] = set()
    for name in launch.ops:
        if any(v in arriving or graph.producers.get(v) in after for v in graph.ops[name].inputs):
            after.add(name)
    first = tuple(o for o in launch.ops if o not in after)
    second = tuple(o for o in launch.ops if o in after)
    before_role, after_role = ROLES[launch.role]
    prefix, dot, _ = launch.ops[0].rpartition(".")
    name = unused_name(f"{prefix}{dot}{after_role}", names)
    return (
        replace(_with(graph, launch, first), role=before_role),
        replace(_with(graph, launch, second), role=after_role, name=name, tile=None),
    )


def _with(graph: Graph, launch: Launch, ops: tuple[str, ...]) -> Launch:
    """``launch`` with some of its ops only, and what crosses between these."""
    inner = tuple(
        c
        for c in launch.crossings
        if graph.producers[c.value] in ops and any(o in ops for o in graph.consumers[c.value])
    )
    return replace(launch, ops=ops, crossings=inner, dependent=None)
