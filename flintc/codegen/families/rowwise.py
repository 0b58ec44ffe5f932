"""One program per row: residual add, norm, and their fusion."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, columns, ops_of, power_of_two
from flintc.ir.graph import Graph, Launch


def norm(graph: Graph, launch: Launch) -> Selection:
    """``add``, ``norm`` or ``add_norm``."""
    sig = Signature(graph, launch)
    adds, norms = ops_of(graph, launch, "add"), ops_of(graph, launch, "norm")
    for op in adds:
        sig.value("x", op.inputs[0])
        sig.value("residual", op.inputs[1])
    if not adds:
        sig.value("x", norms[0].inputs[0])
    for op in norms:
        sig.value("weight", op.inputs[1])
    for op in adds:
        if not norms:
            sig.value("sum", op.outputs[0])
        sig.value("residual_out", op.outputs[1])
    for op in norms:
        sig.value("y", op.outputs[0])
    width = columns(graph, (adds or norms)[0].inputs[0])
    constants: dict[str, int | float | bool] = {"WIDTH": width, "BLOCK": power_of_two(width)}
    if norms:
        constants["EPS"] = float(norms[0].attrs["eps"])  # type: ignore[arg-type]
    return sig.select(
        f"{launch.role}_{width}",
        "norm.py.j2",
        "Residual add and RMSNorm of one row.",
        grid=("B", 1, 1),
        blocks={"add": bool(adds), "norm": bool(norms)},
        constants=constants,
    )


SELECTORS: dict[str, Selector] = {"add": norm, "norm": norm, "add_norm": norm}
