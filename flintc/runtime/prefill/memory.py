"""How much memory a chunk of the general path needs besides weights and cache."""

from __future__ import annotations

from collections import Counter

from flintc.ir.graph import Graph
from flintc.ir.plan import General, Routine

#: Rows whose logits are held at once.
LOGITS_ROWS = 512


def chunk_bytes(graph: Graph, general: General, rows: int, context: int) -> int:
    """Most bytes that activations of ``rows`` rows, the keys they attend to and unpacked weights take at once.

    A sequence holds up to ``context`` tokens. What torch keeps between pieces of memory is not counted.
    """
    env = {"B": rows, "Q": 1, "T": 1, "C": 1, "P": 1}
    left = Counter(v for r in general.routines for v in _read(graph, r))
    live: dict[str, int] = {}
    most = 0
    for routine in general.routines:
        if graph.head.issuperset(routine.ops):
            continue
        inside = {v: graph.values[v].type.nbytes(env) for v in _made(graph, routine)}
        inside |= (keys := _keys(graph, routine, rows, context))
        # Twice the keys: their pages are gathered before they are laid side by side.
        passing = sum(keys.values()) + _unpacked(graph, routine)
        most = max(most, sum(live.values()) + sum(inside.values()) + passing)
        live |= inside
        for value in _read(graph, routine):
            left[value] -= 1
        live = {v: size for v, size in live.items() if left[v] > 0}
    head = general.routines[-1]
    logits = sum(graph.values[v].type.nbytes({**env, "B": min(rows, LOGITS_ROWS)}) for v in _made(graph, head))
    # What is read of logits, their logarithms of probabilities say, and the part of them that it is read of.
    return max(most, sum(live.values()) + _unpacked(graph, head) + 3 * logits)


def router_bytes(graph: Graph, general: General) -> int:
    """Every router's weight in BF16 parts, which the first chunk makes and which are kept."""
    total = 0
    for routine in general.routines:
        for op in (graph.ops[o] for o in routine.ops if graph.ops[o].kind == "router"):
            parts = general.kernels[routine.kernels["topk"]].constants["PARTS"]
            total += 2 * int(parts) * graph.values[op.inputs[1]].type.size({})
    return total


def _read(graph: Graph, routine: Routine) -> set[str]:
    return {v for o in routine.ops for v in graph.ops[o].inputs}


def _made(graph: Graph, routine: Routine) -> set[str]:
    """Activations in memory while the routine runs, partials of attention apart: they never leave its kernel."""
    if routine.kind == "attention":
        return set(graph.ops[routine.ops[-1]].outputs)
    return {v for o in routine.ops for v in graph.ops[o].outputs if graph.values[v].kind == "activation"}


def _keys(graph: Graph, routine: Routine, rows: int, context: int) -> dict[str, int]:
    """Keys and values that a chunk attends to, under the name of the cache's new version."""
    if routine.kind != "heads":
        return {}
    write = graph.ops[routine.ops[-1]]
    _, planes, heads, page, head = graph.values[write.inputs[2]].type.shape
    assert isinstance(planes, int) and isinstance(heads, int) and isinstance(page, int) and isinstance(head, int)
    window = write.attrs["window"]
    assert window is None or isinstance(window, int)
    positions = context if window is None else min(context, rows + window + 2 * page)
    return {write.outputs[0]: 2 * planes * heads * head * (-(-positions // page) * page)}


def _unpacked(graph: Graph, routine: Routine) -> int:
    """The largest packed weight of the routine, in BF16."""
    if "unpack" not in routine.kernels:
        return 0
    weights = (graph.values[v].type for v in _read(graph, routine))
    return max(2 * t.size({}) for t in weights if t.dtype == "nvfp4")
