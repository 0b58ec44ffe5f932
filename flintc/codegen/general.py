"""The general path of a plan: which routine serves which ops when there are many rows, and its kernels.

A routine is a run of ops that is worth a kernel of its own at any number of rows; products with dense weights are left
to a library. docs/prefill.md says what each does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from flintc.codegen.general_kernels import Kernels
from flintc.ir.graph import Graph, Op
from flintc.ir.plan import General, Plan, Routine, RoutineKind

#: Runs of ops that share a routine, the longest first; the rest are routines by themselves.
RUNS: tuple[tuple[RoutineKind, tuple[str, ...]], ...] = (
    ("experts", ("router", "topk", "expert_linear", "silu_mul", "expert_linear")),
    ("heads", ("head_norm", "head_norm", "rope", "kv_write")),
    ("heads", ("head_norm", "head_norm", "kv_write")),
    ("attention", ("attention_partial", "attention_merge")),
    ("norm", ("combine", "sum", "add", "norm")),
    ("norm", ("combine", "add", "norm")),
    ("norm", ("add", "norm")),
    ("norm", ("norm",)),
    ("embed", ("embed",)),
    ("linear", ("linear",)),
    ("silu", ("silu_mul",)),
)


def with_general(plan: Plan) -> Plan:
    """``plan`` with a general path, or as it is where no routine serves its graph."""
    return replace(plan, general=general(plan.graph))


def general(graph: Graph) -> General | None:
    """The general path of a graph, whatever its partition; None where its ops stand in an order that none serves.

    The head must be one product, so that its rows can be made some at a time.
    """
    runs = list(_runs(graph))
    heads = [kind for kind, ops in runs if graph.head.issuperset(op.name for op in ops)]
    if sum(len(ops) for _, ops in runs) != len(graph.ops) or heads != ["linear"]:
        return None
    if not all(_fits(graph, kind, ops) for kind, ops in runs):
        return None
    kernels = Kernels(graph)
    routines = tuple(
        Routine(ops[0].name, kind, tuple(op.name for op in ops), getattr(kernels, kind)(ops)) for kind, ops in runs
    )
    return General(kernels.table.by_name, routines)


def _runs(graph: Graph) -> Iterator[tuple[RoutineKind, tuple[Op, ...]]]:
    """The ops cut into runs, in an order in which each has what it reads; stops at an op that nothing serves."""
    ops = _postponed(graph)
    at = 0
    while at < len(ops):
        for kind, kinds in RUNS:
            run = tuple(ops[at : at + len(kinds)])
            if tuple(op.kind for op in run) == kinds and _chained(graph, run):
                yield kind, run
                at += len(run)
                break
        else:
            return


def _postponed(graph: Graph) -> list[Op]:
    """The ops in order, but a `combine` moved to just before its reader: a norm takes it in."""
    ops: list[Op] = []
    held: dict[str, Op] = {}
    for op in graph.ops.values():
        if op.kind == "combine" and len(graph.consumers[op.outputs[0]]) == 1:
            held[op.outputs[0]] = op
            continue
        ops += [held.pop(value) for value in op.inputs if value in held]
        ops.append(op)
    return ops


def _chained(graph: Graph, run: Sequence[Op]) -> bool:
    """Whether nothing but the run's last op, and the add's residual, is read by others where the run is fused."""
    kept = {"add": slice(1, None), "topk": slice(1, None), "rope": slice(0, 1), "router": slice(0, 0)}
    for op, after in pairwise(run):
        if op.kind == "head_norm":
            continue  # two of them, read by what follows them
        inner = [v for v in op.outputs if v not in op.outputs[kept.get(op.kind, slice(0, 0))]]
        for value in inner:
            readers = set(graph.consumers[value])
            if value in graph.outputs or not readers <= {x.name for x in run} or not readers:
                return False
        if op.kind in ("combine", "sum", "add") and inner[0] not in after.inputs:
            return False
    return True


def _fits(graph: Graph, kind: str, ops: Sequence[Op]) -> bool:
    """Whether a routine's kernels can lay out what the ops say."""
    if kind != "heads":
        return True
    q, k, write = ops[0], ops[1], ops[-1]
    heads, keys = (op.attrs["heads"] for op in (q, k))
    assert isinstance(heads, tuple) and isinstance(keys, tuple)
    total = graph.values[q.inputs[0]].type.shape[1]
    side_by_side = heads[0] == 0 and keys[0] == heads[1] and write.attrs["v_heads"] == (keys[0] + keys[1], keys[1])
    return side_by_side and total == heads[1] + 2 * keys[1] and q.inputs[0] == k.inputs[0] == write.inputs[1]
