"""The bounds that verify and its bisection hold values to."""

from __future__ import annotations

import torch

from flintc import api
from flintc.bench.tolerance import bf16_step, compare_value, roundings
from flintc.ir.graph import Graph, Launch, Op
from flintc.spec import bind_defaults, load_spec


def shared_add(after: str) -> tuple[Graph, Launch, Op]:
    """The launch of a layer's shared add after a pass, and the op."""
    graph = api.run_passes(bind_defaults(load_spec("tiny-flint")), "bf16", stop_after=after).graph
    op = next(op for op in graph.ops.values() if op.kind == "sum")
    return graph, next(launch for launch in graph.launches if op.name in launch.ops), op


def test_roundings_are_counted_from_what_both_sides_have() -> None:
    graph, launch, op = shared_add("combine-gemv")
    routed, shared = op.inputs
    assert roundings(graph, launch.ops)[op.outputs[0]] == 3
    assert roundings(graph, graph.ops, known=graph.values)[op.outputs[0]] == 1
    kept = roundings(graph, graph.ops, known={v for x in graph.launches for o in x.ops for v in graph.ops[o].inputs})
    assert kept[routed] == 1 and kept[shared] == 1


def test_terms_that_nearly_cancel() -> None:
    """A step of a rounded term is many of the sum's; of a term that both sides read it is none."""
    graph, launch, op = shared_add("combine-gemv")
    routed, shared = op.inputs
    (out,) = op.outputs
    one, other = torch.ones(1, 8), torch.full((1, 8), -255 / 256)
    want = (one + other).to(torch.bfloat16)
    values = {routed: one.to(torch.bfloat16), shared: other.to(torch.bfloat16), out: want}
    off = want + bf16_step(one).to(torch.bfloat16)
    assert compare_value(graph, launch, out, off, values, roundings(graph, launch.ops)).passed
    found = compare_value(graph, launch, out, off, values, {out: 3})
    assert not found.passed and found.excess > 8
    assert not compare_value(graph, launch, out, want + 8 * bf16_step(one), values, roundings(graph, launch.ops)).passed
