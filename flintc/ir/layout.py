"""Places the boxes of a small acyclic graph in ranks from top to bottom and routes its edges between them.

The usual three steps: ranks by longest path, order within a rank by the average place of the neighbours, positions
as near to the neighbours as the widths allow. Edges over several ranks pass through a slim lane in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

Point = tuple[float, float]

#: Pixels between boxes of one rank, between ranks, and the width of a lane.
GAP, RANK_GAP, LANE = 28.0, 46.0, 18.0
_SWEEPS = 12
#: How much more a lane cares to run straight than a box to stand above its neighbours.
_STRAIGHT = 8.0


@dataclass(frozen=True, slots=True)
class Box:
    """Place of a node: left, top, width, height, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def centre(self) -> float:
        """Horizontal middle."""
        return self.x + self.width / 2


@dataclass(frozen=True)
class Layout:
    """Boxes by node, points of each edge from its source's lower side to its target's upper side, and the size."""

    boxes: Mapping[str, Box]
    routes: Mapping[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


def place(sizes: Mapping[str, tuple[float, float]], edges: Mapping[tuple[str, str], float]) -> Layout:
    """Lay out nodes of the given (width, height); ``edges`` must not form a cycle.

    Each edge comes with the room its label takes beside its beginning, in pixels.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(sizes)
    graph.add_edges_from(edges)
    rank = _ranks(graph)
    chains = {edge: _lanes(edge, rank) for edge in graph.edges}
    lanes: nx.DiGraph[str] = nx.DiGraph()
    lanes.add_nodes_from(sizes)
    for chain in chains.values():
        nx.add_path(lanes, chain)
    for chain in chains.values():
        rank.update({lane: rank[chain[0]] + i for i, lane in enumerate(chain)})
    widths = {n: sizes[n][0] if n in sizes else LANE for n in lanes}
    centres = _centres(lanes, _ordered_rows(lanes, rank), widths)
    return _finish(sizes, rank, chains, centres, edges)


def _ranks(graph: nx.DiGraph[str]) -> dict[str, int]:
    """Longest path from a source; then sources move down to just above their first reader."""
    rank: dict[str, int] = {}
    for node in nx.topological_sort(graph):
        rank[node] = max((rank[p] + 1 for p in graph.pred[node]), default=0)
    for node in graph:
        if not graph.pred[node] and graph.succ[node]:
            rank[node] = min(rank[s] for s in graph.succ[node]) - 1
    return rank


def _lanes(edge: tuple[str, str], rank: Mapping[str, int]) -> list[str]:
    """The edge as a path: its source, a lane in each rank it passes, its target."""
    source, target = edge
    return [source, *(f"{source}->{target}@{r}" for r in range(rank[source] + 1, rank[target])), target]


def _ordered_rows(graph: nx.DiGraph[str], rank: Mapping[str, int]) -> list[list[str]]:
    """Nodes and lanes of each rank, ordered so that edges cross little."""
    rows: list[list[str]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node in graph:
        rows[rank[node]].append(node)
    place = {n: float(i) for row in rows for i, n in enumerate(row)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = graph.pred if down else graph.succ
            row.sort(key=lambda n, near=near: _mean((place[m] for m in near[n]), place[n]))  # type: ignore[misc]
            place.update({n: float(i) for i, n in enumerate(row)})
    return rows


def _centres(graph: nx.DiGraph[str], rows: Sequence[Sequence[str]], widths: Mapping[str, float]) -> dict[str, float]:
    """Horizontal middles: every node as near to its neighbours' average as the others in its rank allow."""
    centre: dict[str, float] = {}
    for row in rows:
        centre.update(zip(row, _spread([0.0] * len(row), [widths[n] for n in row]), strict=True))
    for sweep in range(2 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else list(reversed(rows)):
            wished = [_wish(n, (*graph.pred[n], *graph.succ[n]), centre, widths) for n in row]
            centre.update(zip(row, _spread(wished, [widths[n] for n in row]), strict=True))
    return centre


def _wish(node: str, near: Sequence[str], centre: Mapping[str, float], widths: Mapping[str, float]) -> float:
    """Where ``node`` would stand if it had its rank for itself; a lane pulls strongest at the lanes it continues."""
    pull = [_STRAIGHT if widths[node] == widths[m] == LANE else 1.0 for m in near]
    total = sum(pull)
    return sum(w * centre[m] for w, m in zip(pull, near, strict=True)) / total if total else centre[node]


def _spread(wished: Sequence[float], widths: Sequence[float], gap: float = GAP) -> list[float]:
    """Positions nearest to those wished (least squares) that keep the order and do not overlap."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + gap)
    blocks: list[tuple[float, int]] = []
    for wish, offset in zip(wished, offsets, strict=False):
        total, count = wish - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            previous = blocks.pop()
            total, count = total + previous[0], count + previous[1]
        blocks.append((total, count))
    starts = [total / count for total, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=False)]


def _mean(values: Iterable[float], otherwise: float) -> float:
    found = list(values)
    return sum(found) / len(found) if found else otherwise


def _finish(
    sizes: Mapping[str, tuple[float, float]],
    rank: Mapping[str, int],
    chains: Mapping[tuple[str, str], list[str]],
    centres: Mapping[str, float],
    labels: Mapping[tuple[str, str], float],
) -> Layout:
    """Heights, and everything moved so that the leftmost box begins at 0."""
    heights = [0.0] * (max(rank.values(), default=-1) + 1)
    for node, (_, height) in sizes.items():
        heights[rank[node]] = max(heights[rank[node]], height)
    tops = [sum(heights[:r]) + RANK_GAP * r for r in range(len(heights))]
    left = min((centres[n] - sizes[n][0] / 2 for n in sizes), default=0.0)
    left = min(left, *(c - LANE for c in centres.values())) if centres else 0.0
    boxes = {n: Box(centres[n] - w / 2 - left, tops[rank[n]], w, h) for n, (w, h) in sizes.items()}
    below = {chain[1]: centres[chain[1]] - left for chain in chains.values()}
    exits = _exits(boxes, chains, below, labels)
    routes = {}
    for edge, chain in chains.items():
        lanes = [(centres[n] - left, tops[rank[n]], tops[rank[n]] + heights[rank[n]]) for n in chain[1:-1]]
        routes[edge] = _route((exits[edge], boxes[edge[0]].y + boxes[edge[0]].height), lanes, boxes[edge[1]])
    width = max((c - left + (sizes[n][0] / 2 if n in sizes else LANE) for n, c in centres.items()), default=0.0)
    return Layout(boxes, routes, width, sum(heights) + RANK_GAP * max(0, len(heights) - 1))


def _exits(
    boxes: Mapping[str, Box],
    chains: Mapping[tuple[str, str], list[str]],
    below: Mapping[str, float],
    labels: Mapping[tuple[str, str], float],
) -> dict[tuple[str, str], float]:
    """Where each edge leaves its source: towards what is ``below`` it, with room for the labels between."""
    exits: dict[tuple[str, str], float] = {}
    for name, box in boxes.items():
        edges = sorted((e for e in chains if e[0] == name), key=lambda e: below[chains[e][1]])
        wished = [_towards(box, below[chains[e][1]]) for e in edges]
        rooms = [labels[e] for e in edges]
        # An edge stands at the left of the room that its label takes.
        spread = _spread([x + room / 2 for x, room in zip(wished, rooms, strict=True)], rooms, LANE / 2)
        places = [x - room / 2 for x, room in zip(spread, rooms, strict=True)]
        excess = max(0.0, (places[-1] if places else 0.0) - (box.x + box.width - LANE / 2))
        exits.update({e: max(box.x + LANE / 2, x - excess) for e, x in zip(edges, places, strict=True)})
    return exits


def _route(start: Point, lanes: Sequence[tuple[float, float, float]], target: Box) -> tuple[Point, ...]:
    """From ``start`` down each lane (middle, top, bottom) to the upper side of ``target``."""
    points = [start]
    for x, top, bottom in lanes:
        points += [(x, top), (x, bottom)]
    return (*points, (_towards(target, points[-1][0]), target.y))


def _towards(box: Box, x: float) -> float:
    """Where on a side of ``box`` an edge from or to ``x`` meets it: inside the middle two thirds."""
    reach = box.width / 3
    return max(box.centre - reach, min(box.centre + reach, x))
