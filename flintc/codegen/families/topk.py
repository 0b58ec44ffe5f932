"""The choice of experts, alone."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, columns, ops_of
from flintc.ir.graph import Graph, Launch


def topk(graph: Graph, launch: Launch) -> Selection:
    """``topk`` alone: one program, of one warp, per row."""
    (op,) = ops_of(graph, launch, "topk")
    sig = Signature(graph, launch)
    for name, value in zip(("logits", "seqs", "ids", "weights"), (*op.inputs, *op.outputs), strict=True):
        sig.value(name, value)
    experts, chosen = columns(graph, op.inputs[0]), columns(graph, op.outputs[0])
    constants: dict[str, int | float | bool] = {
        "EXPERTS": experts,
        "CHOSEN": chosen,
        "SOFTMAX": op.attrs["score"] == "softmax",
        "RENORMALIZE": op.attrs["renormalize"] is True,
    }
    return sig.select(
        f"topk_{chosen}of{experts}",
        "topk.py.j2",
        "The best experts of one row and their weights.",
        grid=("B", 1, 1),
        constants=constants,
        num_warps=1,
    )


SELECTORS: dict[str, Selector] = {"topk": topk}
