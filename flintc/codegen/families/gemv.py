"""Dense matrix-vector products on tensor cores: plain, with the gated activation, with the heads' epilogue."""

from __future__ import annotations

from dataclasses import dataclass

from flintc.codegen.selection import Selection, Selector, Signature, only_op, ops_of
from flintc.errors import VerificationError
from flintc.ir.graph import Graph, Launch, Op

Constants = dict[str, int | float | bool]

#: Columns of K that the instruction's four lanes of a row cover with one 16-byte load each.
STEP = 32

#: 16-byte loads of one thread in flight for a tile of weights: 64 registers.
TILE_LOADS = 16

#: Warps of a program at most; they share K.
MAX_WARPS = 8

#: Registers per thread that let two programs of MAX_WARPS warps share an SM, so that a launch starts beside the last.
#: Stated, it also makes the compiler load all of x at once after the wait rather than where each part is used.
MAX_REGISTERS = 128

#: Output rows of a program where the launch does not say.
TILE = 16


@dataclass(frozen=True, slots=True)
class Walk:
    """How the warps of a program walk K: ``chains`` independent sums in each, ``steps`` steps of each at a time."""

    warps: int
    chains: int
    steps: int

    @property
    def split(self) -> int:
        """Partial sums of one output."""
        return self.warps * self.chains

    @property
    def block(self) -> int:
        """Columns of K in one tile."""
        return self.split * self.steps * STEP


def walk(tile: int, k: int) -> Walk:
    """The largest tile within K and the registers: all warps busy before any takes a second step.

    A tile of 16 rows is one instruction per half step, each waiting for the one before: two chains hide that.
    """
    steps = max(1, (1 << (k.bit_length() - 1)) // STEP)
    warps = min(MAX_WARPS, steps)
    chains = 2 if tile == 16 and steps > warps else 1
    return Walk(warps, chains, min(steps // (warps * chains), max(1, TILE_LOADS * 8 // tile // chains)))


def max_registers(tile: int) -> int:
    """Register budget of a program; larger tiles have loads enough in flight however they are scheduled."""
    return MAX_REGISTERS if tile == 16 else 0


def tile_of(launch: Launch) -> int:
    """Weight rows of one program: what the launch says, a multiple of the instruction's 16."""
    tile = launch.tile or TILE
    if tile % 16:
        raise VerificationError(f"launch {launch.name}: a tile of {tile} rows is not a multiple of 16")
    return tile


def matrix(graph: Graph, op: Op) -> tuple[int, int]:
    """(output rows, K) of an op's weight, of one expert where experts are stacked."""
    rows, k = graph.values[op.inputs[-1]].type.shape[-2:]
    assert isinstance(rows, int) and isinstance(k, int)
    return rows, k


def walk_constants(rows: int, k: int, tile: int, shape: Walk) -> Constants:
    """What every product is bound to: [N, K] weights, the tile, and whether any of it needs masks."""
    return {
        "N": rows, "K": k, "TILE": tile, "SPLIT": shape.split, "STEPS": shape.steps,
        "EVEN": rows % tile == 0 and k % shape.block == 0,
    }  # fmt: skip


def weight_blocks(graph: Graph, launch: Launch, op: Op) -> dict[str, str | bool]:
    """Format of an op's weight, and whether it may be read above the wait."""
    weight = op.inputs[-1]
    return {
        "nvfp4": graph.values[weight].type.dtype == "nvfp4",
        "prefetch": launch.dependent is not None and weight in launch.dependent.prefetch,
    }


def is_rounded(graph: Graph, op: Op) -> bool:
    """Whether the op's output is BF16: its sums are rounded before anything reads them."""
    return graph.values[op.outputs[0]].type.dtype == "bf16"


def linear(graph: Graph, launch: Launch) -> Selection:
    """``linear``: one product, in BF16 or FP32."""
    op = only_op(graph, launch, "linear")
    (n, k), tile = matrix(graph, op), tile_of(launch)
    shape = walk(tile, k)
    sig = Signature(graph, launch)
    sig.value("x", op.inputs[0])
    sig.value("weight", op.inputs[1])
    sig.value("y", op.outputs[0])
    sig.symbol("B", "B")
    rounded = is_rounded(graph, op)
    return sig.select(
        f"linear_{n}x{k}" + ("" if rounded else "_f32"),
        "gemv.py.j2",
        f"y [B, {n}] = x [B, {k}] times weight [{n}, {k}].",
        grid=(-(-n // tile), 1, 1),
        blocks={"epilogue": "store", "rounded": rounded, **weight_blocks(graph, launch, op)},
        constants=walk_constants(n, k, tile, shape),
        num_warps=shape.warps,
        max_registers=max_registers(tile),
    )


def gate_up(graph: Graph, launch: Launch) -> Selection:
    """``gate_up``: a product whose rows are gates, then ups; writes their activation."""
    op, silu = only_op(graph, launch, "linear"), only_op(graph, launch, "silu_mul")
    (n, k), tile = matrix(graph, op), tile_of(launch)
    shape = walk(tile, k)
    sig = Signature(graph, launch)
    sig.value("x", op.inputs[0])
    sig.value("weight", op.inputs[1])
    sig.value("act", silu.outputs[0])
    sig.symbol("B", "B")
    return sig.select(
        f"gate_up_{n}x{k}",
        "gemv.py.j2",
        f"act [B, {n // 2}] = silu(gate) * up, both rows of weight [{n}, {k}] times x [B, {k}].",
        grid=(-(-n // tile), 1, 1),
        blocks={"epilogue": "silu_mul", "rounded": is_rounded(graph, op), **weight_blocks(graph, launch, op)},
        constants=walk_constants(n, k, tile, shape),
        num_warps=shape.warps,
        max_registers=max_registers(tile),
    )


def qkv(graph: Graph, launch: Launch) -> Selection:
    """``qkv``: a product seen as heads; the last program of a head norms, rotates and stores it."""
    op, write = only_op(graph, launch, "linear"), only_op(graph, launch, "kv_write")
    (n, k), tile = matrix(graph, op), tile_of(launch)
    shape = walk(tile, k)
    sig = Signature(graph, launch)
    sig.value("x", op.inputs[0])
    sig.value("weight", op.inputs[1])
    heads, head = _heads(graph, op)
    parts = -(-head // tile)
    constants = walk_constants(n, k, tile, shape)
    constants |= {"HEAD": head, "PARTS": parts, "EVEN": head % tile == 0 and k % shape.block == 0}
    _finished_heads(graph, launch, sig, constants)
    columns = sig.extent("columns", graph.values[write.inputs[5]].type.shape[1], constants)
    sig.counters("arrivals", heads)
    sig.symbol("B", "B")
    rotate, windowed = bool(ops_of(graph, launch, "rope")), write.attrs["window"] is not None
    return sig.select(
        f"qkv_{n}x{k}" + ("_rope" if rotate else "") + ("_window" if windowed else ""),
        "gemv.py.j2",
        f"qkv [B, {n}] = x [B, {k}] times weight; heads are normed{', rotated' if rotate else ''} and stored.",
        grid=(heads * parts, 1, 1),
        blocks={
            "epilogue": "heads", "rotate": rotate, "windowed": windowed, "columns": columns,
            **weight_blocks(graph, launch, op),
        },
        constants=constants,
        num_warps=shape.warps,
        max_registers=max_registers(tile),
    )  # fmt: skip


def _heads(graph: Graph, op: Op) -> tuple[int, int]:
    """(heads, channels of one) of a product seen as heads."""
    _, heads, head = graph.values[op.outputs[0]].type.shape
    assert isinstance(heads, int) and isinstance(head, int)
    return heads, head


def _finished_heads(graph: Graph, launch: Launch, sig: Signature, constants: Constants) -> None:
    """Parameters and constants of the epilogue that finishes heads: which are q, k and v, and where they go."""
    op, write = only_op(graph, launch, "linear"), only_op(graph, launch, "kv_write")
    k_norm = next(n for n in ops_of(graph, launch, "head_norm") if _leads_to(graph, launch, n, write))
    (q_norm,) = (n for n in ops_of(graph, launch, "head_norm") if n is not k_norm)
    ropes = ops_of(graph, launch, "rope")
    sig.value("qkv", op.outputs[0])
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


def _leads_to(graph: Graph, launch: Launch, norm: Op, write: Op) -> bool:
    """Whether the norm's heads are the keys that ``write`` stores, rotated or not."""
    key = write.inputs[0]
    ropes = [r for r in ops_of(graph, launch, "rope") if r.outputs[1] == key]
    return norm.outputs[0] == (ropes[0].inputs[1] if ropes else key)


def _span(op: Op, name: str) -> tuple[int, int]:
    span = op.attrs[name]
    assert isinstance(span, tuple)
    return span[0], span[1]


def _number(op: Op, name: str) -> float:
    value = op.attrs[name]
    assert isinstance(value, int | float)
    return float(value)


SELECTORS: dict[str, Selector] = {"linear": linear, "gate_up": gate_up, "qkv": qkv}
