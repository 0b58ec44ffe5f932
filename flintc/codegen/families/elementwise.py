"""Ops that need no sum across a row: a copy, an activation, a weighted sum over ranks, a sum of two."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, columns, power_of_two
from flintc.ir.graph import Graph, Launch

#: Columns per program, at most; 8 BF16 values (16 bytes) per thread.
BLOCK, PER_THREAD = 1024, 8

#: Names of the kernel's inputs, and what it does.
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "embed": (("ids", "table"), "Row of the embedding table for one token."),
    "silu_mul": (("x",), "silu(gate) * up of one row."),
    "combine": (("x", "weights"), "Weighted sum over one row's chosen experts, in rank order."),
    "sum": (("a", "b"), "Sum of two rows."),
}


def elementwise(graph: Graph, launch: Launch) -> Selection:
    """``embed``, ``silu_mul``, ``combine`` or ``sum`` alone: programs are (row, block of columns, rank)."""
    (op,) = (graph.ops[o] for o in launch.ops)
    names, doc = KINDS[op.kind]
    sig = Signature(graph, launch)
    for name, value in zip((*names, "y"), (*op.inputs, *op.outputs), strict=True):
        sig.value(name, value)
    width = columns(graph, op.outputs[0])
    block = min(BLOCK, power_of_two(width))
    constants: dict[str, int | float | bool] = {"WIDTH": width, "BLOCK": block}
    ranks = 1
    if op.kind in ("silu_mul", "combine"):
        ranks = _ranks(graph, op.inputs[0])
        constants["RANKS"] = ranks
    return sig.select(
        f"{op.kind}_{width}" if ranks == 1 else f"{op.kind}_{ranks}x{width}",
        "elementwise.py.j2",
        doc,
        grid=("B", -(-width // block), ranks if op.kind == "silu_mul" else 1),
        blocks={"kind": op.kind},
        constants=constants,
        num_warps=max(1, block // (32 * PER_THREAD)),
    )


def _ranks(graph: Graph, value: str) -> int:
    """The middle dimension of [B, ranks, width]; 1 for [B, width]."""
    shape = graph.values[value].type.shape
    ranks = shape[1] if len(shape) == 3 else 1
    assert isinstance(ranks, int)
    return ranks


SELECTORS: dict[str, Selector] = dict.fromkeys(KINDS, elementwise)
