"""Runs a graph op by op in torch: the oracle for every kernel and for the whole model.

The partition into launches plays no part: an unlowered, a lowered and a fused graph compute the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.ops import OPS as DEFINITIONS
from flintc.reference.context import Context, Numerics
from flintc.reference.nvfp4 import Nvfp4
from flintc.reference.ops import OPS

Inputs = Mapping[str, Tensor | Nvfp4]
#: Called after each op with the values it made. A cache is written in place: copy it to keep a version.
Trace = Callable[[Op, Mapping[str, Tensor]], None]


def run(
    graph: Graph,
    inputs: Inputs,
    numerics: Numerics = "rounded",
    *,
    trace: Trace | None = None,
) -> dict[str, Tensor]:
    """Run a whole step and return ``graph.outputs`` by name.

    inputs: every value of kind input, weight, table and cache that an op reads (caches at their first version),
    all on one device, CPU or CUDA. Caches are updated in place. Padded rows (seqs -1) have id 0 and position 0.
    numerics: ``rounded`` rounds to BF16 where the ops say; ``fp32`` nowhere (a BF16 cache still stores BF16).
    On CUDA, TF32 matrix products must be off (torch's default).
    """
    return run_ops(graph, graph.ops.values(), inputs, Context(numerics), graph.outputs, trace)


def run_launch(graph: Graph, launch: Launch, inputs: Inputs, numerics: Numerics = "rounded") -> dict[str, Tensor]:
    """Run the ops of one launch from the values it reads; returns every value its ops make, by name."""
    members = set(launch.ops)
    ops = [op for op in graph.ops.values() if op.name in members]
    made = [value for op in ops for value in op.outputs]
    return run_ops(graph, ops, inputs, Context(numerics), made)


@torch.no_grad()
def run_ops(
    graph: Graph,
    ops: Iterable[Op],
    inputs: Inputs,
    context: Context,
    keep: Iterable[str],
    trace: Trace | None = None,
) -> dict[str, Tensor]:
    """Run ``ops``, given in dataflow order, and return the values ``keep``; others are freed after their last use."""
    keep = tuple(keep)
    values: dict[str, Tensor | Nvfp4] = dict(inputs)
    pending = {value: len(users) for value, users in graph.consumers.items()}
    for op in ops:
        made = run_op(op, values, context)
        values.update(made)
        if trace is not None:
            trace(op, made)
        for value in dict.fromkeys(op.inputs):
            pending[value] -= 1
            if pending[value] == 0 and value not in keep:
                del values[value]
    return {name: _tensor(values[name]) for name in keep}


def run_op(op: Op, values: Inputs, context: Context) -> dict[str, Tensor]:
    """Run one op; returns its outputs by name. KeyError names an input that is not among ``values``."""
    missing = [name for name in op.inputs if name not in values]
    if missing:
        raise KeyError(f"op {op.name} reads {', '.join(missing)}, not given")
    attrs = {**DEFINITIONS[op.kind].attrs, **op.attrs}
    results = OPS[op.kind](context, *(values[name] for name in op.inputs), **attrs)
    return dict(zip(op.outputs, results, strict=True))


def _tensor(value: Tensor | Nvfp4) -> Tensor:
    assert isinstance(value, Tensor)
    return value
