"""Kernels of one name in one process: each runs its own text."""

from __future__ import annotations

import torch

from flintc.codegen.interpret import load_interpreted
from flintc.ir.plan import Kernel, Param

SOURCE = """import triton
import triton.language as tl


@triton.jit
def store(x_ptr, VALUE: tl.constexpr):
    tl.store(x_ptr, VALUE{})
"""


def kernel(what: str) -> Kernel:
    return Kernel("store", SOURCE.format(what), (Param("x_ptr", "*f32"),), {"VALUE": 3}, 1, 1, False)


def test_kernels_of_one_name_keep_apart() -> None:
    """All are loaded before the first is run: the interpreter reads a text as late as that."""
    plain, doubled = load_interpreted(kernel("")), load_interpreted(kernel(" * 2"))
    x = torch.zeros(1)
    plain((1, 1, 1), [x])
    assert x.item() == 3
    doubled((1, 1, 1), [x])
    assert x.item() == 6
