"""Facts about a graph's values that every executor of a plan needs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flintc.ir.plan import Scratch
from flintc.ir.types import DType, resolve
from flintc.reference.nvfp4 import Nvfp4

TORCH_DTYPES: dict[DType, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}


def zeroed(
    memory: Mapping[str, Scratch], env: Mapping[str, int], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Zeros for memory that is no value of the graph, by name, sized by the symbols ``env``."""
    return {
        name: torch.zeros([resolve(d, env) for d in s.type.shape], dtype=TORCH_DTYPES[s.type.dtype], device=device)
        for name, s in memory.items()
    }


def for_kernels(tensors: Mapping[str, Tensor | Nvfp4]) -> dict[str, Tensor | Nvfp4]:
    """Tensors as kernels read them: a packed weight is in their order (a copy, unless it came so), a scale per row."""
    return {n: t.in_kernel_order().with_row_scales() if isinstance(t, Nvfp4) else t for n, t in tensors.items()}
