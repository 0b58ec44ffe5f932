"""The dataflow graph of one forward step and its partition into launches.

Ops say *what* is computed, with every rounding point in it. A launch is a set of ops that share one
kernel call. Passes change the partition; they never touch an op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from flintc.ir.types import TensorType

if TYPE_CHECKING:
    import networkx as nx

ValueKind = Literal["input", "weight", "table", "cache", "activation"]
Trigger = Literal["early", "waited", "late"]
CrossingKind = Literal["local", "recompute", "last-arriver", "cluster", "grid-barrier"]
Attr = int | float | str | bool | None | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that ops read or write. SSA: at most one op produces it.

    kind: ``input`` changes every step (ids, positions, sequence slots, block tables), ``weight`` and ``table``
    never change, ``cache`` is a version of a layer's KV cache, ``activation`` is made inside the step.
    """

    name: str
    type: TensorType
    kind: ValueKind
    layer: int | None = None
    #: For a weight: the key of ``weights:`` in the spec that describes it.
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """One primitive operation; ``kind`` names its definition in :mod:`flintc.ir.ops`."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    layer: int | None = None

    @property
    def label(self) -> str:
        """Name without its layer prefix: ``L12.q_norm`` -> ``q_norm``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Crossing:
    """How a value travels from its producer to a consumer inside one launch.

    ``local``: same program, in registers. ``recompute``: every program evaluates the producer itself.
    ``last-arriver``: through global memory; the last program of a group, found by a counter, consumes it.
    ``cluster`` and ``grid-barrier``: through distributed shared memory or a barrier over the grid.
    """

    value: str
    kind: CrossingKind
    #: Programs that must arrive before the last one goes on: "head", "row", "launch" (last-arriver only).
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Dependent:
    """Programmatic dependent launch of one launch: what is read above the wait, where the trigger stands.

    ``early``: the trigger stands first. ``waited``: right below the wait, so that whatever the next launch finds done
    when it starts, this one has waited for. ``late``: last.
    """

    prefetch: tuple[str, ...] = ()
    trigger: Trigger = "early"
    #: The same in steps of one row, where it is another.
    alone: Dependent | None = None

    @property
    def of_one_row(self) -> Dependent:
        """How the launch is chained in steps of one row."""
        return self.alone or self


@dataclass(frozen=True, slots=True)
class Launch:
    """A set of ops run by one call of one kernel entry over one grid.

    ``role`` selects the template (a lone op's role is its kind); ``tile`` is the number of output rows of the
    anchor GEMV that one program computes (None where no GEMV is in the launch).
    """

    name: str
    role: str
    ops: tuple[str, ...]
    crossings: tuple[Crossing, ...] = ()
    tile: int | None = None
    dependent: Dependent | None = None


@dataclass(frozen=True)
class Graph:
    """Ops and values of one step, partitioned into launches in execution order. Immutable."""

    name: str
    values: Mapping[str, Value]
    ops: Mapping[str, Op]
    launches: tuple[Launch, ...]
    outputs: tuple[str, ...]
    #: Names of the ops of the output head (the blocks of ``model.head``): counted and timed apart from the step.
    head: frozenset[str] = frozenset()

    @cached_property
    def producers(self) -> Mapping[str, str]:
        """Value name -> name of the op that makes it."""
        return {v: op.name for op in self.ops.values() for v in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """Value name -> names of the ops that read it, in op order."""
        uses: dict[str, list[str]] = {v: [] for v in self.values}
        for op in self.ops.values():
            for v in dict.fromkeys(op.inputs):
                uses[v].append(op.name)
        return {v: tuple(names) for v, names in uses.items()}

    @cached_property
    def launch_of(self) -> Mapping[str, Launch]:
        """Op name -> the launch that holds it."""
        return {op: launch for launch in self.launches for op in launch.ops}

    @cached_property
    def first_versions(self) -> Mapping[str, str]:
        """Every version of every cache -> the first, whose memory it lives in."""
        first = {v.name: v.name for v in self.values.values() if v.kind == "cache" and v.name not in self.producers}
        for op in self.ops.values():
            for output in op.outputs:
                if self.values[output].kind == "cache":
                    before = next((v for v in op.inputs if self.values[v].kind == "cache"), output)
                    first[output] = first.get(before, before)
        return first

    @cached_property
    def op_graph(self) -> nx.DiGraph[str]:
        """Ops as nodes, one edge per producer-consumer pair (attribute ``values``)."""
        import networkx as nx  # here, since running a plan does not need it

        g: nx.DiGraph[str] = nx.DiGraph()
        g.add_nodes_from(self.ops)
        for value, producer in self.producers.items():
            for consumer in self.consumers[value]:
                if g.has_edge(producer, consumer):
                    g.edges[producer, consumer]["values"] += (value,)
                else:
                    g.add_edge(producer, consumer, values=(value,))
        return g

    @cached_property
    def launch_graph(self) -> nx.DiGraph[str]:
        """Launches as nodes, an edge where one reads what another makes."""
        import networkx as nx

        g: nx.DiGraph[str] = nx.DiGraph()
        g.add_nodes_from(launch.name for launch in self.launches)
        for a, b in self.op_graph.edges:
            la, lb = self.launch_of[a].name, self.launch_of[b].name
            if la != lb:
                g.add_edge(la, lb)
        return g

    def inner_values(self, launch: Launch) -> tuple[str, ...]:
        """Values made and read inside ``launch``: each needs a stated crossing."""
        ops = set(launch.ops)
        return tuple(v for o in launch.ops for v in self.ops[o].outputs if any(c in ops for c in self.consumers[v]))

    def reads(self, launch: Launch) -> tuple[str, ...]:
        """Values ``launch`` reads that are made outside it, in op order, each once."""
        made = {v for o in launch.ops for v in self.ops[o].outputs}
        return tuple(dict.fromkeys(v for o in launch.ops for v in self.ops[o].inputs if v not in made))

    def writes(self, launch: Launch) -> tuple[str, ...]:
        """Values ``launch`` makes that another launch or the caller reads."""
        ops = set(launch.ops)
        return tuple(
            v
            for o in launch.ops
            for v in self.ops[o].outputs
            if v in self.outputs or any(c not in ops for c in self.consumers[v])
        )

    def layer_launches(self, layer: int | None) -> tuple[Launch, ...]:
        """Launches of one layer in order (None: those before and after the layers)."""
        return tuple(x for x in self.launches if self.ops[x.ops[0]].layer == layer)

    @property
    def body(self) -> tuple[Launch, ...]:
        """Launches without the head's: what a launch count of the step means."""
        return tuple(x for x in self.launches if not self.head.issuperset(x.ops))

    def layers(self) -> Iterator[int]:
        """Layer numbers in ascending order."""
        yield from sorted({op.layer for op in self.ops.values() if op.layer is not None})

    def with_launches(self, launches: tuple[Launch, ...]) -> Graph:
        """The same ops under another partition; what was found out about the ops alone still holds."""
        other = replace(self, launches=launches)
        other.__dict__.update({name: self.__dict__[name] for name in _OF_OPS & self.__dict__.keys()})
        return other


#: Properties of a graph that its launches have no part in.
_OF_OPS = frozenset({"producers", "consumers", "first_versions", "op_graph"})
