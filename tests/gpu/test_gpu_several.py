"""Kernels for several rows, which only Flint's own sizes have: the bits of those for one."""

from __future__ import annotations

import pytest
import torch

from flintc import api
from flintc.bench.forward import ForwardBench
from flintc.ir.build import Weights
from flintc.spec import load_spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_a_row_among_eight_is_the_row_alone(weights: Weights) -> None:
    target = api.gpu_target()
    assert target is not None
    bundle = api.compile(api._resized(load_spec("flint"), {"layers": 4}), weights=weights, target=target)
    compiled = bundle.for_target(target)
    launches = {x.kernel: x for x in bundle.plan.launches}.values()
    others = [bundle.plan.kernel_for(x, 8).name for x in launches if bundle.plan.kernels[x.kernel].several]
    assert others and all(name not in {x.kernel for x in launches} for name in others)
    eight = ForwardBench(bundle.plan, compiled, 600, 8)
    alone = ForwardBench(bundle.plan, compiled, 600, 1, given=eight.tensors)
    among = eight.logits(3).unflatten(0, (3, 8))[:, 0]
    assert among.isfinite().all()
    assert torch.equal(alone.logits(3), among)
