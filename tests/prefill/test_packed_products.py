"""Packed weights on the general path: unpacked exactly, and multiplied in the order of words."""

from __future__ import annotations

import pytest
import torch

from flintc import api
from flintc.bench.synthetic import tensors
from flintc.codegen.general import general
from flintc.ir.packed import LANE_COLUMNS, in_blocks
from flintc.ir.plan import Plan, Routine
from flintc.reference import Nvfp4, run_op
from flintc.reference.context import Context
from flintc.runtime.prefill.launch import InterpretedLaunch
from flintc.runtime.prefill.products import bf16_parts, in_word_order
from flintc.runtime.prefill.routines import UNPACKED_UNIT, Given, experts
from flintc.runtime.values import for_kernels
from flintc.spec import load_spec


@pytest.fixture(scope="module")
def words():
    """(plan, launch, given) of a layer whose sizes are whole words, so that no expert's weight is unpacked."""
    model = api._resized(load_spec("tiny-flint"), {"layers": 3, "hidden": 256, "expert_width": 128})
    graph = api.run_passes(model, "nvfp4", stop_after="baseline").graph
    made = general(graph)
    given = tensors(graph, {"B": 1, "Q": 1, "T": 1, "P": 1, "C": 8}, 10000.0, "cpu", 0)
    plan = Plan(graph, {}, (), {}, {}, {}, general=made)
    launch = InterpretedLaunch(made.kernels)
    return plan, launch, Given(plan, launch, for_kernels(given)), given


def every_code(rows: int, columns: int) -> Nvfp4:
    """Every code under every finite scale that is not negative, as far as they fit."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(127)[: rows * columns // 2]
    scales = torch.arange(127, dtype=torch.uint8).repeat_interleave(32)[: rows * columns // 16]
    return Nvfp4(codes.view(rows, columns // 2), scales.view(rows, columns // 16), torch.ones(rows))


#: Rows and columns of weights whose rows are whole words: such that follow each other, and in blocks.
WHOLE_WORDS = [(508, 128), (496, 128), (16, 3968)]


@pytest.mark.parametrize(
    ("rows", "columns", "ordered"),
    [(2032, 32, False)] + [(*size, ordered) for size in WHOLE_WORDS for ordered in (False, True)],
)
def test_unpacking_is_exact(words, rows, columns, ordered):
    plan, launch, *_ = words
    weight = every_code(rows, columns)
    packed = weight.in_kernel_order()
    y = torch.full(weight.shape, torch.nan, dtype=torch.bfloat16)
    kernel = plan.general.kernels["rows_unpack" + "_ordered" * ordered]
    lanes = y.numel() // LANE_COLUMNS
    grid = (-(-lanes // int(kernel.constants["LANES"])), 1, 1)
    row = columns // LANE_COLUMNS if in_blocks(rows, columns) else 0
    launch(kernel, grid, codes=packed.codes, scales=packed.scales, y=y, lanes=lanes, row=row)
    want = weight.unscaled()
    assert torch.equal(y.float() * UNPACKED_UNIT, (in_word_order(want) if ordered else want).float())


def routine_of(plan: Plan, layer: int) -> Routine:
    return next(r for r in plan.general.routines if r.kind == "experts" and f"L{layer}." in r.name)


@pytest.mark.parametrize("rows", [1, 7, 90])
def test_experts_in_the_order_of_words(words, rows):
    """Tiles of all widths: with 90 rows and 3 of 8 experts for each, some get more than 32."""
    plan, _, given, tensors_ = words
    routine = routine_of(plan, 2)
    kernels = {purpose: plan.general.kernels[name] for purpose, name in routine.kernels.items()}
    assert kernels["gate_up"].name.endswith("_packed") and kernels["down"].name.endswith("_packed")
    router, topk, gate_up, silu, down = (plan.graph.ops[name] for name in routine.ops)
    h = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    values = {router.inputs[0]: in_word_order(h)}
    experts(given, routine, None, values)
    known = {**tensors_, router.inputs[0]: h, "seqs": torch.zeros(rows, dtype=torch.int32)}
    for op in (router, topk, gate_up, silu, down):
        known |= run_op(op, known, Context())
    assert torch.equal(values[topk.outputs[0]], known[topk.outputs[0]])
    torch.testing.assert_close(values[topk.outputs[1]], known[topk.outputs[1]], rtol=1e-5, atol=1e-6)
    want, got = known[down.outputs[0]].float(), values[down.outputs[0]].float()
    # Two roundings, of the activation and of the result, after sums in another order.
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-7 * want.square().mean().sqrt().item())


def test_router_weights_are_the_sum_of_their_parts():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.randint(-20, 20, (8, 64))
    parts = bf16_parts(weight, 3)
    assert torch.equal(parts.double().view(3, 8, 64).sum(0), weight.double())
