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


def place(sizes: Mapping[str, tuple[float, float]], edges: Iterable[tuple[str, str]]) -> Layout:
    """Lay out nodes of the given (width, height); ``edges`` must not form a cycle."""
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
    return _finish(sizes, rank, chains, centres)


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
            wished = [_mean((centre[m] for m in (*graph.pred[n], *graph.succ[n])), centre[n]) for n in row]
            centre.update(zip(row, _spread(wished, [widths[n] for n in row]), strict=True))
    return centre


def _spread(wished: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Positions nearest to those wished (least squares) that keep the order and do not overlap."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + GAP)
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
) -> Layout:
    """Heights, and everything moved so that the leftmost box begins at 0."""
    heights = [0.0] * (max(rank.values(), default=-1) + 1)
    for node, (_, height) in sizes.items():
        heights[rank[node]] = max(heights[rank[node]], height)
    tops = [sum(heights[:r]) + RANK_GAP * r for r in range(len(heights))]
    left = min((centres[n] - sizes[n][0] / 2 for n in sizes), default=0.0)
    left = min(left, *(c - LANE for c in centres.values())) if centres else 0.0
    boxes = {n: Box(centres[n] - w / 2 - left, tops[rank[n]], w, h) for n, (w, h) in sizes.items()}
    routes = {edge: _route(boxes, chain, rank, tops, heights, centres, left) for edge, chain in chains.items()}
    width = max((c - left + (sizes[n][0] / 2 if n in sizes else LANE) for n, c in centres.items()), default=0.0)
    return Layout(boxes, routes, width, sum(heights) + RANK_GAP * max(0, len(heights) - 1))


def _route(
    boxes: Mapping[str, Box],
    chain: Sequence[str],
    rank: Mapping[str, int],
    tops: Sequence[float],
    heights: Sequence[float],
    centres: Mapping[str, float],
    left: float,
) -> tuple[Point, ...]:
    source, target = boxes[chain[0]], boxes[chain[-1]]
    points: list[Point] = [(_towards(source, centres[chain[1]] - left), source.y + source.height)]
    for lane in chain[1:-1]:
        r = rank[lane]
        points += [(centres[lane] - left, tops[r]), (centres[lane] - left, tops[r] + heights[r])]
    return (*points, (_towards(target, points[-1][0]), target.y))


def _towards(box: Box, x: float) -> float:
    """Where on a side of ``box`` an edge from or to ``x`` meets it: inside the middle two thirds."""
    reach = box.width / 3
    return max(box.centre - reach, min(box.centre + reach, x))
