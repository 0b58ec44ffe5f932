"""Products with the chosen experts' weights: alone, with the gated activation, and down with the weighted sum."""

from __future__ import annotations

from flintc.codegen.families.gemv import (
    BF16,
    INSTRUCTION_COLUMNS,
    MAX_WARPS,
    NVFP4,
    Constants,
    Format,
    Walk,
    blocked,
    chains_of,
    format_of,
    is_rounded,
    kernel_name,
    lay_out,
    matrix,
    registers_of,
    steps_at_a_time,
    tile_of,
    weight_blocks,
)
from flintc.codegen.selection import Selection, Selector, Signature, columns, only_op, ops_of, power_of_two
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.packed import in_blocks


def expert_linear(graph: Graph, launch: Launch) -> Selection:
    """``expert_linear``: one product per row and rank."""
    op = only_op(graph, launch, "expert_linear")
    x, ids, weight = op.inputs
    (n, k), tile, ranks = matrix(graph, op), tile_of(launch), columns(graph, ids)
    own, rounded = len(graph.values[x].type.shape) == 3, is_rounded(graph, op)
    name = kernel_name(graph, op, "expert_linear") + ("_own" if own else "") + ("" if rounded else "_f32")
    shape, registers = lay_out(name, tile, k, format_of(graph, op), -(-n // tile) * ranks)
    sig = Signature(graph, launch)
    sig.value("x", x)
    sig.value("ids", ids)
    sig.value("weight", weight)
    sig.value("y", op.outputs[0])
    vector = f"x [B, {ranks}, {k}]" if own else f"x [B, {k}]"
    return sig.select(
        name,
        "expert_gemv.py.j2",
        f"y [B, {ranks}, {n}] = {vector} times weight [E, {n}, {k}] of the expert of each row and rank.",
        grid=(-(-n // tile), ranks, "B"),
        blocks={
            "shared": False,
            "halves": False,
            "sends": False,
            "paired": False,
            "own": own,
            "rounded": rounded,
            **weight_blocks(graph, launch, op),
        },
        constants=shape.constants(n, k, tile) | {"RANKS": ranks},
        num_warps=shape.warps,
        max_registers=registers,
    )


def expert_gate_up(graph: Graph, launch: Launch) -> Selection:
    """``expert_gate_up``: gate and up of the chosen experts and of the shared one, if any; writes the activations."""
    op, shared = only_op(graph, launch, "expert_linear"), ops_of(graph, launch, "linear")
    x, ids, weight = op.inputs
    (n, k), tile, ranks = matrix(graph, op), tile_of(launch), columns(graph, ids)
    tiles = -(-n // tile)
    slots = -(-matrix(graph, shared[0])[0] // (tile * tiles)) if shared else 0
    name = kernel_name(graph, op, "expert_gate_up") + ("_shared" if shared else "")
    shape, registers = lay_out(name, tile, k, format_of(graph, op), tiles * (slots + ranks))
    constants = shape.constants(n, k, tile) | {"RANKS": ranks}
    sig = Signature(graph, launch)
    sig.value("x", x)
    sig.value("ids", ids)
    sig.value("weight", weight)
    for other in shared:
        sig.value("shared", other.inputs[1])
    sig.value("act", _activation(graph, launch, op))
    for other in shared:
        rows, _ = matrix(graph, other)
        constants |= {
            "SHARED_WIDTH": rows // 2,
            "SHARED_SLOTS": slots,
            "SHARED_EVEN": rows == slots * tile * tiles and k % shape.block == 0,
            **blocked(shape.format, rows, k, "SHARED_"),
        }
        sig.value("shared_act", _activation(graph, launch, other))
        sig.symbol("B", "B")
    return sig.select(
        name,
        "expert_gemv.py.j2",
        f"act [B, {ranks}, {n // 2}] = silu(gate) * up of the expert of each row and rank"
        + (", and the same of the shared expert." if shared else "."),
        grid=(tiles, slots + ranks, "B"),
        blocks={
            "shared": bool(shared), "paired": True, "own": False, "rounded": is_rounded(graph, op),
            "shared_rounded": bool(shared) and is_rounded(graph, shared[0]),
            "sends": False,
            "halves": bool(shared) and _makes_halves(shape, k),
            **weight_blocks(graph, launch, shared[0] if shared else op),
        },
        constants=constants,
        num_warps=shape.warps,
        max_registers=registers,
        one_row={"lone": bool(shared) and shape.cuts, "halves": False, "sends": shape.format is NVFP4},
    )  # fmt: skip


def expert_down(graph: Graph, launch: Launch) -> Selection:
    """``expert_down``: down products of the chosen experts, their weighted sum, plus the shared expert's, if any."""
    op, shared = only_op(graph, launch, "expert_linear"), ops_of(graph, launch, "linear")
    combine = only_op(graph, launch, "combine")
    x, ids, weight = op.inputs
    (n, k), tile, ranks = matrix(graph, op), tile_of(launch), columns(graph, ids)
    format = format_of(graph, op)
    shared_k = matrix(graph, shared[0])[1] if shared else 0
    slots = power_of_two(ranks + -(-shared_k // k))
    name = kernel_name(graph, op, "expert_down") + ("_shared" if shared else "")
    ahead = launch.dependent is not None and ids in launch.dependent.prefetch
    shape = _own(tile, k, format, min(slots, MAX_WARPS), ahead=ahead)
    constants: Constants = {
        "N": n, "K": k, "TILE": tile, "SPLIT": slots, "CHAINS": shape.chains, "STEPS": shape.steps,
        "EVEN": n % tile == 0 and k % (shape.steps * format.step) == 0 and shared_k % k == 0,
        "RANKS": ranks, **blocked(format, n, k),
    }  # fmt: skip
    if format is NVFP4:
        constants["MIXED"] = bool(shared) and in_blocks(n, k) != in_blocks(n, shared_k)
    sig = Signature(graph, launch)
    sig.value("x", x)
    sig.value("ids", ids)
    sig.value("mix", combine.inputs[1])
    sig.value("weight", weight)
    for other in shared:
        sig.value("shared_x", other.inputs[0])
        sig.value("shared", other.inputs[1])
        constants["SHARED_K"] = shared_k
    output = only_op(graph, launch, "sum") if shared else combine
    sig.value("y", output.outputs[0])
    return sig.select(
        name,
        "expert_down.py.j2",
        f"y [B, {n}] = the {ranks} chosen experts' products, weighted and summed"
        + (", plus the shared expert's." if shared else "."),
        grid=(-(-n // tile), "B", 1),
        blocks={
            "shared": bool(shared), "nvfp4": format is NVFP4,
            "ahead": ahead,
        },
        constants=constants,
        num_warps=shape.warps,
        max_registers=registers_of(name, tile, -(-n // tile), shape.warps),
        apart=True,
    )  # fmt: skip


def _makes_halves(shape: Walk, k: int) -> bool:
    """Whether the sums of several vectors can be made half of the chains at a time: ``accumulate_halves``."""
    return shape.format is NVFP4 and shape.chains == INSTRUCTION_COLUMNS and shape.block == k


def _own(tile: int, k: int, format: Format, warps: int, *, ahead: bool) -> Walk:
    """Walk of warps that each have a product of their own.

    BF16 weights known ``ahead`` of the wait are all sent for there, if registers hold twice of what they usually do;
    below the wait few steps at a time leave registers, and so room for more programs. Their chains take steps in turn,
    so that how many a tile has changes no bit; those of NVFP4 weights do not.
    """
    steps = steps_at_a_time(tile, k, 1, format)
    chains = chains_of(tile, steps, format, INSTRUCTION_COLUMNS if k <= steps * format.step else 4)
    if format is BF16 and not ahead:
        steps = min(steps, chains)
    elif format is BF16 and k == 2 * steps * format.step:
        steps *= 2
    return Walk(format, warps, chains, steps)


def _activation(graph: Graph, launch: Launch, op: Op) -> str:
    """The output of the ``silu_mul`` in ``launch`` that reads ``op``."""
    (silu,) = (s for s in ops_of(graph, launch, "silu_mul") if s.inputs == op.outputs)
    return silu.outputs[0]


SELECTORS: dict[str, Selector] = {
    "expert_linear": expert_linear,
    "expert_gate_up": expert_gate_up,
    "expert_down": expert_down,
}
