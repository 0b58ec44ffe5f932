"""Which values may cross which way inside a launch: one table per question, and the rule that joins them.

A launch is many programs in no order. A value made and read inside it crosses safely only where the consumer finds
all it needs: in its own program's registers, by evaluating the producer again, or behind a synchronisation. Three
facts decide: how much of its output one program *holds* after a producer, how much of an input an op *needs* for any
one element it makes, and which ops *spread*, that is, run in many programs that share their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from flintc.ir.graph import Crossing, Graph, Launch, Op
from flintc.ir.ops import OPS


class Extent(IntEnum):
    """Part of a value, ordered: each extent covers those below it."""

    SPLIT = 0  #: one split-KV partial of one head
    TILE = 1  #: some output rows of a matrix product, the same elements the consumer makes
    HEAD = 2  #: all channels of one head, all its splits
    ROW = 3  #: everything that belongs to one row of the step
    STEP = 4  #: all rows: what one row writes, another may read


#: What one program holds after evaluating an op. Ops left out are elementwise: they hold what they are given.
HOLDS: Mapping[str, Extent] = {
    "embed": Extent.ROW,
    "norm": Extent.ROW,
    "linear": Extent.TILE,
    "router": Extent.TILE,
    "expert_linear": Extent.TILE,
    "head_norm": Extent.HEAD,
    "rope": Extent.HEAD,
    "kv_write": Extent.HEAD,
    "attention": Extent.HEAD,
    "attention_partial": Extent.SPLIT,
    "attention_merge": Extent.HEAD,
    "topk": Extent.ROW,
}

#: What one element of an op's output needs of each input. Ports left out need the same element (``TILE``): for
#: ``silu_mul`` gate and up of one column, for ``combine`` all experts of one column, both held by one program.
NEEDS: Mapping[tuple[str, str], Extent] = {
    ("norm", "x"): Extent.ROW,
    ("linear", "x"): Extent.ROW,
    ("router", "x"): Extent.ROW,
    ("expert_linear", "x"): Extent.ROW,
    ("expert_linear", "ids"): Extent.ROW,
    ("combine", "weights"): Extent.ROW,
    ("topk", "logits"): Extent.ROW,
    ("head_norm", "x"): Extent.HEAD,
    ("rope", "q"): Extent.HEAD,
    ("rope", "k"): Extent.HEAD,
    ("kv_write", "k"): Extent.HEAD,
    ("kv_write", "v"): Extent.HEAD,
    ("attention", "q"): Extent.HEAD,
    ("attention_partial", "q"): Extent.HEAD,
    ("attention_merge", "o"): Extent.HEAD,
    ("attention_merge", "m"): Extent.HEAD,
    ("attention_merge", "l"): Extent.HEAD,
    ("attention", "cache"): Extent.STEP,
    ("attention_partial", "cache"): Extent.STEP,
}

#: Ops whose programs share their inputs: none of them can find an input in its own registers alone, and the last
#: program of a group cannot do their work for all.
SPREADS = frozenset({"linear", "router", "expert_linear", "attention", "attention_partial"})

#: Ops too dear to evaluate once per program (weights or KV would be read again), and the one with a side effect.
NEVER_RECOMPUTED = SPREADS | {"kv_write"}

#: What the last program of a group finds complete.
GROUPS: Mapping[str, Extent] = {
    "head": Extent.HEAD,
    "row-head": Extent.HEAD,
    "row": Extent.ROW,
    "launch": Extent.STEP,
}

#: What the programs of one cluster can hand each other: at most 16 programs, so a head but never a row.
CLUSTER = Extent.HEAD


def illegal_crossing(graph: Graph, launch: Launch, crossing: Crossing) -> str | None:
    """Why ``crossing`` cannot work in ``launch``; None if it can. Its value is made and read inside the launch."""
    producer = graph.ops[graph.producers[crossing.value]]
    if crossing.kind == "last-arriver":
        if crossing.group not in GROUPS:
            return f"last-arriver needs a group: {', '.join(GROUPS)}"
    elif crossing.group is not None:
        return f"only last-arriver has a group, {crossing.kind} has none"
    if crossing.kind == "recompute":
        reason = _not_recomputable(graph, launch, producer)
        if reason is not None:
            return reason
    found = _held_after(graph, launch, producer, crossing)
    for name in graph.consumers[crossing.value]:
        if name not in launch.ops:
            continue
        consumer = graph.ops[name]
        for port in ports_reading(consumer, crossing.value):
            reason = _unreachable(consumer, port, crossing, found)
            if reason is not None:
                return reason
        if crossing.kind == "local" and producer.kind in HOLDS and held(graph, launch, consumer) < found:
            return f"{consumer.name} runs in more programs than {producer.name}: that is recompute, not local"
    return None


def ports_reading(op: Op, value: str) -> tuple[str, ...]:
    """Input ports of ``op`` that read ``value``."""
    ports = OPS[op.kind].inputs
    return tuple(p.rstrip("?") for p, v in zip(ports, op.inputs, strict=False) if v == value)


def held(graph: Graph, launch: Launch, op: Op) -> Extent:
    """What one program of ``launch`` holds of the outputs of ``op``.

    An elementwise op holds what its inputs inside the launch leave it, and anything (``ROW``) where all come from
    memory.
    """
    if op.kind in HOLDS:
        return HOLDS[op.kind]
    crossings = {c.value: c for c in launch.crossings}
    extents = [
        _held_after(graph, launch, graph.ops[graph.producers[v]], crossings[v])
        for v in op.inputs
        if v in crossings and v in graph.producers
    ]
    return min(extents, default=Extent.ROW)


def _held_after(graph: Graph, launch: Launch, producer: Op, crossing: Crossing) -> Extent:
    """What a consumer finds of a value that crosses this way."""
    if crossing.kind == "grid-barrier":
        return Extent.STEP
    if crossing.kind == "last-arriver":
        return GROUPS[crossing.group or "head"]
    if crossing.kind == "cluster":
        return max(CLUSTER, held(graph, launch, producer))
    return held(graph, launch, producer)


def _not_recomputable(graph: Graph, launch: Launch, producer: Op) -> str | None:
    """Why not every program can evaluate ``producer``, and what feeds it within the launch, for itself."""
    if producer.kind in NEVER_RECOMPUTED:
        return f"{producer.name} cannot be recomputed: every program would do all the work of a {producer.kind}"
    for crossing in launch.crossings:
        if crossing.value not in producer.inputs or crossing.kind == "grid-barrier":
            continue
        if crossing.kind in ("last-arriver", "cluster"):
            return f"{producer.name} reads {crossing.value}, which does not reach every program"
        reason = _not_recomputable(graph, launch, graph.ops[graph.producers[crossing.value]])
        if reason is not None:
            return reason
    return None


def _unreachable(consumer: Op, port: str, crossing: Crossing, found: Extent) -> str | None:
    """Why ``consumer`` cannot find at ``port`` what it needs."""
    need = NEEDS.get((consumer.kind, port), Extent.TILE)
    if found < need:
        return (
            f"{consumer.name} needs the {need.name.lower()} at {port}; by {crossing.kind} it finds the "
            f"{found.name.lower()}"
        )
    if consumer.kind in SPREADS and crossing.kind in ("local", "last-arriver"):
        return f"{consumer.name} runs in many programs, which share {port}: {crossing.kind} reaches one of them"
    return None
