"""Patterns: a piece of graph written with the verbs of the IR, and the places where a graph looks like it.

A pattern is built from the ops it matches::

    add = op("add")
    norm = op("norm", x=add["sum"])

says: a ``norm`` whose ``x`` is the ``sum`` of an ``add``. Two ops that read one value from elsewhere share a
``given``. A node is compared by identity, so that a pattern may hold two alike ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flintc.ir.graph import Attr, Graph, Op
from flintc.ir.ops import OPS
from flintc.ir.types import TensorType


@dataclass(frozen=True, eq=False)
class Given:
    """A value from outside the pattern that several of its ops read."""

    name: str


@dataclass(frozen=True)
class Port:
    """An input or output of a pattern's op."""

    node: Node
    name: str

    def __str__(self) -> str:
        return f"{self.node.kind}.{self.name}"


@dataclass(frozen=True, eq=False)
class Node:
    """Stands for an op of ``kind``; ``reads`` says which values some of its inputs are."""

    kind: str
    reads: Mapping[str, Port | Given] = field(default_factory=dict)

    def __getitem__(self, port: str) -> Port:
        """An input or output port, by the name :mod:`flintc.ir.ops` gives it; outputs where both have it."""
        assert port in self.inputs or port in OPS[self.kind].outputs, f"{self.kind} has no port {port}"
        return Port(self, port)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input ports."""
        return tuple(p.removesuffix("?") for p in OPS[self.kind].inputs)


def op(kind: str, **reads: Port | Node | Given) -> Node:
    """A pattern's op; a node given for an input stands for that node's only output."""
    node = Node(kind, {port: _source(source) for port, source in reads.items()})
    assert set(reads) <= set(node.inputs), f"{kind} reads {node.inputs}, not {tuple(reads)}"
    return node


def given(name: str) -> Given:
    """A value that several ops of a pattern read and none makes."""
    return Given(name)


def _source(source: Port | Node | Given) -> Port | Given:
    if isinstance(source, Node):
        (only,) = OPS[source.kind].outputs
        return Port(source, only)
    return source


@dataclass(frozen=True)
class Match:
    """A pattern found in a graph: which op each node stands for."""

    graph: Graph
    ops: Mapping[Node, Op]

    @property
    def names(self) -> frozenset[str]:
        """Names of the matched ops."""
        return frozenset(op.name for op in self.ops.values())

    def value(self, port: Port) -> str:
        """The value at ``port``; KeyError where an optional input is absent."""
        op = self.ops[port.node]
        outputs = OPS[op.kind].outputs
        if port.name in outputs:
            return op.outputs[outputs.index(port.name)]
        return dict(zip(port.node.inputs, op.inputs, strict=False))[port.name]

    def type(self, port: Port) -> TensorType:
        """Type of the value at ``port``."""
        return self.graph.values[self.value(port)].type

    def attr(self, node: Node, name: str) -> Attr:
        """An attribute of the op that ``node`` stands for."""
        return self.ops[node].attrs[name]


def find(graph: Graph, nodes: tuple[Node, ...], anchor: Op) -> Iterator[Match]:
    """Every way in which ``nodes`` fit ``graph`` with the first of them at ``anchor``."""
    if anchor.kind == nodes[0].kind:
        yield from _extend(graph, nodes, {nodes[0]: anchor})


def _extend(graph: Graph, nodes: tuple[Node, ...], ops: dict[Node, Op]) -> Iterator[Match]:
    """Bind the nodes that are not in ``ops`` yet, one after the other, going back where one does not fit."""
    match = Match(graph, ops)
    givens = _givens(match)
    if givens is None:
        return
    if len(ops) == len(nodes):
        yield match
        return
    node = nodes[len(ops)]
    for name in _candidates(match, node, givens):
        candidate = graph.ops[name]
        if candidate.kind == node.kind and candidate not in ops.values():
            yield from _extend(graph, nodes, {**ops, node: candidate})


def _givens(match: Match) -> dict[Given, str] | None:
    """The value each given stands for; None where a bound op reads something else than its pattern says."""
    givens: dict[Given, str] = {}
    for node, op in match.ops.items():
        actual = dict(zip(node.inputs, op.inputs, strict=False))
        for port, source in node.reads.items():
            if port not in actual:
                return None
            if isinstance(source, Given):
                expected = givens.setdefault(source, actual[port])
            else:
                expected = match.value(source) if source.node in match.ops else actual[port]
            if actual[port] != expected:
                return None
    return givens


def _candidates(match: Match, node: Node, givens: Mapping[Given, str]) -> tuple[str, ...]:
    """Ops that may stand for ``node``: the maker of what a bound op reads from it, or readers of what it must read."""
    for bound, op in match.ops.items():
        for port, source in bound.reads.items():
            if isinstance(source, Port) and source.node is node:
                value = op.inputs[bound.inputs.index(port)]
                return (match.graph.producers[value],) if value in match.graph.producers else ()
    for source in node.reads.values():
        if isinstance(source, Given) and source in givens:
            return match.graph.consumers[givens[source]]
        if isinstance(source, Port) and source.node in match.ops:
            return match.graph.consumers[match.value(source)]
    return ()
