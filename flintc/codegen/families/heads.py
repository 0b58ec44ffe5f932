"""One program per row and head: the norm of heads, their rotation, the write to the cache."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, ops_of
from flintc.ir.graph import Graph, Launch, Op

Constants = dict[str, int | float | bool]


def head_norm(graph: Graph, launch: Launch) -> Selection:
    """``head_norm`` alone."""
    (op,) = ops_of(graph, launch, "head_norm")
    sig = Signature(graph, launch)
    for name, value in (("x", op.inputs[0]), ("weight", op.inputs[1]), ("y", op.outputs[0])):
        sig.value(name, value)
    heads, head = _heads(graph, op.inputs[0])
    first, count = _span(op, "heads")
    return sig.select(
        f"head_norm_{count}x{head}",
        "head_norm.py.j2",
        "RMSNorm of one head of one row.",
        grid=("B", count, 1),
        constants={"HEADS": heads, "FIRST": first, "COUNT": count, "HEAD": head, "EPS": float(op.attrs["eps"])},  # type: ignore[arg-type]
        num_warps=1,
    )


def rope(graph: Graph, launch: Launch) -> Selection:
    """``rope`` alone: every head of q and k."""
    (op,) = ops_of(graph, launch, "rope")
    sig = Signature(graph, launch)
    for name, value in zip(("q", "k", "positions", "table"), op.inputs, strict=True):
        sig.value(name, value)
    for name, value in zip(("q_out", "k_out"), op.outputs, strict=True):
        sig.value(name, value)
    (heads, head), (kv_heads, _) = _heads(graph, op.inputs[0]), _heads(graph, op.inputs[1])
    return sig.select(
        f"rope_{heads}and{kv_heads}x{head}",
        "rope.py.j2",
        "Rotary position embedding of one head of one row.",
        grid=("B", heads + kv_heads, 1),
        constants={"HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head},
        num_warps=1,
    )


def kv_write(graph: Graph, launch: Launch) -> Selection:
    """``kv_write`` alone. The new version of the cache is the old one's memory."""
    (op,) = ops_of(graph, launch, "kv_write")
    k, v, _, positions, seqs, table = op.inputs
    sig = Signature(graph, launch)
    for name, value in (("k", k), ("v", v), ("positions", positions), ("seqs", seqs), ("block_table", table)):
        sig.value(name, value)
    sig.value("cache", op.outputs[0])
    (v_heads, head), (first, count) = _heads(graph, v), _span(op, "v_heads")
    page, columns = graph.values[op.outputs[0]].type.shape[3], graph.values[table].type.shape[1]
    assert isinstance(page, int)
    constants: Constants = {"KV_HEADS": count, "V_HEADS": v_heads, "V_FIRST": first, "HEAD": head, "PAGE": page}
    return sig.select(
        "kv_write" if op.attrs["window"] is None else f"kv_write_window{op.attrs['window']}",
        "kv_write.py.j2",
        "Stores one head's key and value of one row in the cache.",
        grid=("B", count, 1),
        blocks={"columns": sig.extent("columns", columns, constants), "windowed": op.attrs["window"] is not None},
        constants=constants,
        num_warps=1,
    )


def _heads(graph: Graph, value: str) -> tuple[int, int]:
    """Heads and channels per head of a value [B, heads, head]."""
    _, heads, head = graph.values[value].type.shape
    assert isinstance(heads, int) and isinstance(head, int)
    return heads, head


def _span(op: Op, name: str) -> tuple[int, int]:
    span = op.attrs[name]
    assert isinstance(span, tuple)
    return span[0], span[1]


SELECTORS: dict[str, Selector] = {"head_norm": head_norm, "rope": rope, "kv_write": kv_write}
