"""What attention loads above its wait: of the cache what earlier steps wrote, and below it what this step writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from kv_cases import Rows, Sizes, rows
from launches import poisoned, run_plan
from torch import Tensor

from flintc.codegen.planner import plan
from flintc.ir.graph import Graph
from flintc.ir.plan import Kernel

WAIT = "    wait_for_producers()\n"
KINDS = {
    "strip": Sizes(heads=6, kv_heads=2, head=64, page=32, chunk=16, window=40),
    "strips": Sizes(heads=8, kv_heads=1, head=128, page=64, chunk=64, window=130),
    "run": Sizes(heads=6, kv_heads=2, head=64, page=16, chunk=16),
    "runs": Sizes(heads=8, kv_heads=1, head=128, page=64, chunk=128),
}
#: Positions and sequences: the first tokens, a step of several rows of a sequence across a chunk's end, padded rows.
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one": ([300], [0]),
    "first": ([0, 0], [0, 1]),
    "several": ([126, 127, 128, 129, 5, 0], [1, 1, 1, 1, 0, -1]),
    "ends": ([63, 64, 15, 16], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_each_position_is_loaded_where_it_may_be(sizes: Sizes, step: tuple[Sequence[int], Sequence[int]]) -> None:
    """Three caches behind each other: what is read above the wait, what is left for below it, and all of it.

    Positions that this step writes are NaN in the first, all others in the second.
    """
    made, graph = rows(sizes, *step), sizes.dependent("attention_partial")
    above, below = split(made)
    one = made.cache.numel()
    kernels, plain = plan(graph).kernels.values(), plan(sizes.graph("attention_partial"))
    # Not by the same kernel: what both its loads leave out would be missing in both.
    want = partials(plain.graph, plain.kernels[plain.launches[0].kernel], made, made.cache)
    assert len(kernels) == (2 if sizes.window is None else 1)
    for kernel in kernels:
        assert "load_earlier" in kernel.source
        moved = f"    keys += {one}\n    cache_ptr += {2 * one}\n"
        if "\n    values = " in kernel.source:
            moved += f"    values += {one}\n"
        head, body = kernel.source.rsplit("    # Above: nothing", 1)
        edited = replace(kernel, source=head + body.replace(WAIT, WAIT + moved, 1).partition("\n")[2])
        found = partials(graph, edited, made, torch.cat([above, below, made.cache]))
        for name in graph.outputs:
            assert torch.equal(found[name].view(torch.int32), want[name].view(torch.int32))


def split(made: Rows) -> tuple[Tensor, Tensor]:
    """The cache without what the step writes, and the rest."""
    before, after = made.cache.clone(), torch.full_like(made.cache, torch.nan)
    page, columns = made.sizes.page, made.table.shape[1]
    for position, seq in zip(made.positions.tolist(), made.seqs.tolist(), strict=True):
        if seq >= 0:
            at = int(made.table[seq, position // page % columns]), slice(None), slice(None), position % page
            after[at] = before[at]
            before[at] = torch.nan
    return before, after


def partials(graph: Graph, kernel: Kernel, made: Rows, cache: Tensor) -> dict[str, Tensor]:
    """What ``kernel``, in place of the graph's own for one row and for several, stores; NaN elsewhere."""
    planned = plan(graph)
    (launch,) = planned.launches
    outputs = {v: poisoned(graph.values[v].type, made.env) for v in graph.outputs}
    alone = {kernel.name: replace(kernel, several=None)}
    moved = replace(planned, kernels=alone, launches=(replace(launch, kernel=kernel.name),))
    run_plan(moved, {**made.given, "cache": cache, **outputs}, {}, made.env)
    return outputs
