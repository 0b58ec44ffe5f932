"""The router: alone, or with the norm before it and the choice of experts after it."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, columns, only_op, ops_of, power_of_two
from flintc.ir.graph import Graph, Launch, Op

#: Experts that one program scores where the launch does not say.
TILE = 4

#: FP32 weights of a program that one warp holds in registers: 64 a lane.
WARP_WEIGHTS = 2048


def route(graph: Graph, launch: Launch) -> Selection:
    """``router``, and ``route``: [add +] norm, router, top-k."""
    op = only_op(graph, launch, "router")
    adds, norms, topks = (ops_of(graph, launch, kind) for kind in ("add", "norm", "topk"))
    experts, width = graph.values[op.inputs[1]].type.shape
    assert isinstance(experts, int) and isinstance(width, int)
    tile = power_of_two(launch.tile or TILE)
    programs = -(-experts // tile)
    warps = min(8, max(1, power_of_two(width * tile) // WARP_WEIGHTS))
    constants: dict[str, int | float | bool] = {
        "EXPERTS": experts, "WIDTH": width, "BLOCK": power_of_two(width), "TILE": tile, "WARPS": warps,
    }  # fmt: skip
    sig = Signature(graph, launch)
    for add in adds:
        sig.value("x", add.inputs[0])
        sig.value("residual", add.inputs[1])
    for norm in norms:
        if not adds:
            sig.value("x", norm.inputs[0])
        sig.value("norm", norm.inputs[1])
        constants["EPS"] = float(norm.attrs["eps"])  # type: ignore[arg-type]
    sig.value("router", op.inputs[1])
    for topk in topks:
        sig.value("seqs", topk.inputs[1])
    for add in adds:
        sig.value("residual_out", add.outputs[1])
    sig.value("h", op.inputs[0])
    sig.value("logits", op.outputs[0])
    for topk in topks:
        constants |= _choice(graph, sig, topk)
        sig.counters("arrivals", "B")
    return sig.select(
        f"{launch.role}_{experts}x{width}" + ("_add" if adds else ""),
        "route.py.j2",
        "Norm of a row, its expert logits, and the choice of experts." if topks else "Expert logits of a row.",
        grid=(programs, "B", 1),
        blocks={
            "add": bool(adds), "norm": bool(norms), "topk": bool(topks),
            "prefetch": launch.dependent is not None and op.inputs[1] in launch.dependent.prefetch,
        },
        constants=constants,
        num_warps=warps,
        apart=bool(norms),
    )  # fmt: skip


def _choice(graph: Graph, sig: Signature, topk: Op) -> dict[str, int | float | bool]:
    """Parameters and constants of the choice of experts."""
    sig.value("ids", topk.outputs[0])
    sig.value("mix", topk.outputs[1])
    return {
        "CHOSEN": columns(graph, topk.outputs[0]),
        "SOFTMAX": topk.attrs["score"] == "softmax",
        "RENORMALIZE": topk.attrs["renormalize"] is True,
    }


SELECTORS: dict[str, Selector] = {"router": route, "route": route}
