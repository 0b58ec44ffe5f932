"""One program per row: residual add, norm, and their fusion."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, columns, ops_of, power_of_two
from flintc.ir.graph import Graph, Launch

#: What a kernel does, by whether it adds and whether it norms.
DOCS = {
    (True, True): "Residual add and RMSNorm of one row.",
    (True, False): "Residual add of one row.",
    (False, True): "RMSNorm of one row.",
}


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
    name = f"{launch.role}_{width}"
    if norms:
        constants["EPS"] = float(norms[0].attrs["eps"])  # type: ignore[arg-type]
    if not adds and graph.values[norms[0].inputs[0]].type.dtype == "f32":
        name += "_f32"  # of an unrounded sum
    return sig.select(
        name,
        "norm.py.j2",
        DOCS[bool(adds), bool(norms)],
        grid=("B", 1, 1),
        blocks={"add": bool(adds), "norm": bool(norms)},
        constants=constants,
    )


SELECTORS: dict[str, Selector] = {"add": norm, "norm": norm, "add_norm": norm}
