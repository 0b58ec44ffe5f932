"""Joining launches: the partition after a set of matches, in an order that can be launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx

from flintc.ir.graph import Graph, Launch
from flintc.passes.rule import Found


def fuse(graph: Graph, found: Sequence[Found], tile: int | None = None) -> tuple[Graph, list[Found]]:
    """``graph`` with each match in a launch of its own, and the matches left out since they would close a cycle.

    ``tile``: output rows per program of the new launches; None keeps what their matrix products had.
    """
    joined, dropped = list(found), list[Found]()
    if _cyclic(graph, joined):
        joined = []
        for candidate in found:
            (dropped if _cyclic(graph, [*joined, candidate]) else joined).append(candidate)
    gone = {o for f in joined for o in f.match.names}
    kept = [launch for launch in graph.launches if not gone.issuperset(launch.ops)]
    names = {launch.name for launch in kept}
    rank = {o: i for i, o in enumerate(graph.ops)}
    new = []
    for f in joined:
        new.append(_launch(graph, f, names, rank, tile))
        names.add(new[-1].name)
    return _ordered(graph.with_launches((*kept, *new)), rank), dropped


def _launch(graph: Graph, found: Found, names: set[str], rank: dict[str, int], tile: int | None) -> Launch:
    ops = tuple(sorted(found.match.names, key=rank.__getitem__))
    tiles = [t for t in (graph.launch_of[o].tile for o in ops) if t is not None]
    prefix, dot, _ = ops[0].rpartition(".")
    name = unused_name(f"{prefix}{dot}{found.rule.role}", names)
    return Launch(name, found.rule.role, ops, found.rule.crossings(found.match), (tile or tiles[0]) if tiles else None)


def unused_name(name: str, names: set[str]) -> str:
    """``name``, or with the first free suffix: ``L3.add_norm``, ``L3.add_norm.1``."""
    candidate, n = name, 0
    while candidate in names:
        n += 1
        candidate = f"{name}.{n}"
    return candidate


def _waits(graph: Graph) -> list[tuple[str, str]]:
    """Pairs of ops of which the second comes later: it reads what the first makes, or overwrites what that reads."""
    edges = list(graph.op_graph.edges)
    for value in graph.values.values():
        if value.kind == "cache":
            readers = graph.consumers[value.name]
            writers = [o for o in readers if graph.ops[o].kind == "kv_write"]
            edges += [(reader, writer) for writer in writers for reader in readers if reader != writer]
    return edges


def _contracted(graph: Graph, group: Mapping[str, str]) -> nx.DiGraph[str]:
    """Which group of ops must wait for which."""
    g: nx.DiGraph[str] = nx.DiGraph()
    g.add_nodes_from(group.values())
    g.add_edges_from((group[a], group[b]) for a, b in _waits(graph) if group[a] != group[b])
    return g


def _cyclic(graph: Graph, found: Sequence[Found]) -> bool:
    """Whether launches would wait for each other if all of ``found`` were joined."""
    group = {o: launch.name for o, launch in graph.launch_of.items()}
    for i, f in enumerate(found):
        group.update(dict.fromkeys(f.match.names, f"match {i}"))
    return not nx.is_directed_acyclic_graph(_contracted(graph, group))


def _ordered(graph: Graph, rank: dict[str, int]) -> Graph:
    """The same launches, each after those it waits for, and otherwise in the order of their first ops."""
    by_name = {launch.name: launch for launch in graph.launches}
    first = {name: min(rank[o] for o in launch.ops) for name, launch in by_name.items()}
    waits = _contracted(graph, {o: launch.name for o, launch in graph.launch_of.items()})
    order = nx.lexicographical_topological_sort(waits, key=first.__getitem__)
    return graph.with_launches(tuple(by_name[name] for name in order))
