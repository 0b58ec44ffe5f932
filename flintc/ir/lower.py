"""The one rewrite before the baseline: attention as fixed-size KV partials and their merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flintc.errors import VerificationError
from flintc.ir.graph import Attr, Graph, Launch, Op, Value
from flintc.ir.ops import OPS, infer


def lower_attention(graph: Graph, chunk: int, window_chunk: int | None = None, partials: int = 66) -> Graph:
    """Replace each `attention` by `attention_partial` over chunks of ``chunk`` positions and `attention_merge`.

    Layers with a window have chunks of ``window_chunk`` (default: ``chunk``), each a partial; those over the whole
    context have at most so many ``partials`` a row. The partial keeps the op's name; the merge is ``<name>_merge`` and
    makes the op's output ``y`` from ``y.o``, ``y.m`` and ``y.l``. The graph must hold one launch per op, as built.
    """
    values, ops = dict(graph.values), {}
    pieces: dict[str, tuple[Op, ...]] = {}
    for op in graph.ops.values():
        whole = op.attrs.get("window") is None
        cut: dict[str, Attr] = {
            "chunk": chunk if whole else window_chunk or chunk,
            "partials": partials if whole else None,
        }
        pieces[op.name] = _split(op, cut, values) if op.kind == "attention" else (op,)
        ops.update({piece.name: piece for piece in pieces[op.name]})
    launches: list[Launch] = []
    for launch in graph.launches:
        if len(launch.ops) != 1:
            raise VerificationError(f"{launch.name} is fused already: attention is lowered before any pass")
        for op in pieces[launch.ops[0]]:
            same = op.name == launch.name and op.kind == launch.role
            launches.append(launch if same else Launch(op.name, op.kind, (op.name,)))
    return replace(graph, values=values, ops=ops, launches=tuple(launches))


def _split(op: Op, cut: Mapping[str, Attr], values: dict[str, Value]) -> tuple[Op, Op]:
    """The two ops of one `attention`; their partials are added to ``values``."""
    (y,) = op.outputs
    inputs = dict(zip((p.removesuffix("?") for p in OPS["attention"].inputs), op.inputs, strict=False))
    sinks = (inputs["sinks"],) if "sinks" in inputs else ()
    partials = tuple(f"{y}.{port}" for port in OPS["attention_partial"].outputs)
    attrs = {**op.attrs, **cut}
    read = tuple(v for v in op.inputs if v not in sinks)
    for name, type in zip(
        partials, infer("attention_partial", tuple(values[v].type for v in read), attrs), strict=True
    ):
        values[name] = Value(name, type, "activation", op.layer)
    merge_attrs = {name: attrs[name] for name in OPS["attention_merge"].attrs}
    merge_inputs = (*partials, inputs["positions"], inputs["seqs"], *sinks)
    return (
        Op(op.name, "attention_partial", read, partials, attrs, op.layer),
        Op(f"{op.name}_merge", "attention_merge", merge_inputs, (y,), merge_attrs, op.layer),
    )
