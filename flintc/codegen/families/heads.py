"""One program per row and head: the norm of heads, their rotation, the write to the cache, alone or in one launch."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, only_op, ops_of
from flintc.ir.graph import Graph, Launch, Op

Constants = dict[str, int | float | bool]


def head_norm(graph: Graph, launch: Launch) -> Selection:
    """``head_norm`` alone."""
    (op,) = ops_of(graph, launch, "head_norm")
    sig = Signature(graph, launch)
    for name, value in (("x", op.inputs[0]), ("weight", op.inputs[1]), ("y", op.outputs[0])):
        sig.value(name, value)
    heads, head = heads_of(graph, op.inputs[0])
    first, count = _span(op, "heads")
    return sig.select(
        f"head_norm_{count}x{head}",
        "head_norm.py.j2",
        "RMSNorm of one head of one row.",
        grid=("B", count, 1),
        constants={"HEADS": heads, "FIRST": first, "COUNT": count, "HEAD": head, "EPS": _number(op, "eps")},
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
    (heads, head), (kv_heads, _) = heads_of(graph, op.inputs[0]), heads_of(graph, op.inputs[1])
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
    (v_heads, head), (first, count) = heads_of(graph, v), _span(op, "v_heads")
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


def heads(graph: Graph, launch: Launch) -> Selection:
    """``heads``: everything that finishes the heads of a projection, each in a program of its own."""
    write = only_op(graph, launch, "kv_write")
    qkv = write.inputs[1]
    count, head = heads_of(graph, qkv)
    sig = Signature(graph, launch)
    constants: Constants = {"N": count * head, "HEAD": head}
    finished_heads(graph, launch, qkv, sig, constants)
    blocks = finished_blocks(graph, launch, sig, constants)
    sig.symbol("B", "B")
    return sig.select(
        f"heads_{count}x{head}" + finished_suffix(graph, launch),
        "heads.py.j2",
        f"One head of one row is normed{', rotated' if blocks['rotate'] else ''} and stored.",
        grid=(count, "B", 1),
        blocks=blocks,
        constants=constants,
        num_warps=1,
    )


def finished_heads(graph: Graph, launch: Launch, qkv: str, sig: Signature, constants: Constants) -> None:
    """Parameters and constants of what finishes the heads ``qkv``: which are q, k and v, and where they go."""
    write = only_op(graph, launch, "kv_write")
    k_norm = next(n for n in ops_of(graph, launch, "head_norm") if _leads_to(graph, launch, n, write))
    (q_norm,) = (n for n in ops_of(graph, launch, "head_norm") if n is not k_norm)
    ropes = ops_of(graph, launch, "rope")
    sig.value("qkv", qkv)
    sig.value("q_norm", q_norm.inputs[1])
    sig.value("k_norm", k_norm.inputs[1])
    for rope in ropes:
        sig.value("rope_table", rope.inputs[3])
    sig.value("q", ropes[0].outputs[0] if ropes else q_norm.outputs[0])
    sig.value("cache", write.outputs[0])
    for name, value in zip(("positions", "seqs", "block_table"), write.inputs[3:], strict=True):
        sig.value(name, value)
    (q_first, q_heads), (k_first, kv_heads), (v_first, _) = (
        _span(q_norm, "heads"), _span(k_norm, "heads"), _span(write, "v_heads"),
    )  # fmt: skip
    page = graph.values[write.inputs[2]].type.shape[3]
    assert isinstance(page, int)
    constants |= {
        "Q_FIRST": q_first, "Q_HEADS": q_heads, "K_FIRST": k_first, "V_FIRST": v_first, "KV_HEADS": kv_heads,
        "PAGE": page, "Q_EPS": _number(q_norm, "eps"), "K_EPS": _number(k_norm, "eps"),
    }  # fmt: skip


def finished_suffix(graph: Graph, launch: Launch) -> str:
    """What the name of a kernel that finishes heads ends in: whether it rotates them, whether the cache is a ring."""
    windowed = only_op(graph, launch, "kv_write").attrs["window"] is not None
    return "_rope" * bool(ops_of(graph, launch, "rope")) + "_window" * windowed


def finished_blocks(graph: Graph, launch: Launch, sig: Signature, constants: Constants) -> dict[str, str | bool]:
    """Whether the heads of ``launch`` are rotated, whether the cache is a ring, and its columns."""
    write = only_op(graph, launch, "kv_write")
    return {
        "rotate": bool(ops_of(graph, launch, "rope")),
        "windowed": write.attrs["window"] is not None,
        "columns": sig.extent("columns", graph.values[write.inputs[5]].type.shape[1], constants),
    }


def _leads_to(graph: Graph, launch: Launch, norm: Op, write: Op) -> bool:
    """Whether the norm's heads are the keys that ``write`` stores, rotated or not."""
    key = write.inputs[0]
    ropes = [r for r in ops_of(graph, launch, "rope") if r.outputs[1] == key]
    return norm.outputs[0] == (ropes[0].inputs[1] if ropes else key)


def heads_of(graph: Graph, value: str) -> tuple[int, int]:
    """Heads and channels per head of a value [B, heads, head]."""
    _, count, head = graph.values[value].type.shape
    assert isinstance(count, int) and isinstance(head, int)
    return count, head


def _span(op: Op, name: str) -> tuple[int, int]:
    span = op.attrs[name]
    assert isinstance(span, tuple)
    return span[0], span[1]


def _number(op: Op, name: str) -> float:
    value = op.attrs[name]
    assert isinstance(value, int | float)
    return float(value)


SELECTORS: dict[str, Selector] = {"head_norm": head_norm, "rope": rope, "kv_write": kv_write, "heads": heads}
