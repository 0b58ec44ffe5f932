"""Whether a bundle runs the model of a checkpoint."""

from __future__ import annotations

from flintc.bundle.bundle import Bundle
from flintc.errors import BundleError
from flintc.ir.graph import Graph

#: Attributes that say how attention is cut, not what it computes.
_TILING = ("chunk", "partials")


def check_same_model(bundle: Bundle, graph: Graph, weights: str) -> None:
    """BundleError unless ``bundle`` runs the ops of ``graph``, the checkpoint's own, on weights of the same shapes.

    Sizes of pages and of attention's chunks, and the fusion, are the bundle's to choose.
    """
    where = f"the bundle {bundle.path or bundle.manifest.spec} is for another model than the checkpoint"
    remedy = "leave the bundle out, or make one with `flintc compile --for` and the checkpoint"
    if bundle.manifest.weights != weights:
        raise BundleError(
            f"{where}: its weights are {bundle.manifest.weights}, the checkpoint's {weights}", remedy=remedy
        )
    difference = first_difference(bundle.plan.graph, graph)
    if difference is not None:
        name, there, here = difference
        raise BundleError(f"{where}: {name} is {there} there, {here} here", remedy=remedy)


def first_difference(ours: Graph, theirs: Graph, *, memory: bool = False) -> tuple[str, str, str] | None:
    """The first weight or op that is not the same in two graphs, and what it is in each; None for one model.

    memory: or the first value given to both, so that caches and tables of one serve the other.
    """
    of = (("weight ", _weights_of), ("op ", _ops_of), *((("", _given_to),) if memory else ()))
    for kind, described in of:
        a, b = described(ours), described(theirs)
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                return f"{kind}{name}", a.get(name, "absent"), b.get(name, "absent")
    return None


def _weights_of(graph: Graph) -> dict[str, str]:
    return {v.name: str(v.type) for v in graph.values.values() if v.kind == "weight"}


def _given_to(graph: Graph) -> dict[str, str]:
    return {v.name: str(v.type) for v in graph.values.values() if v.name not in graph.producers}


def _ops_of(graph: Graph) -> dict[str, str]:
    return {
        op.name: " ".join([op.kind, *(f"{k}={v}" for k, v in sorted(op.attrs.items()) if k not in _TILING)])
        for op in graph.ops.values()
    }
