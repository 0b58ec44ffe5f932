"""Where the reference rounds: at the points the ops state, or nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Numerics = Literal["rounded", "fp32"]


@dataclass(frozen=True, slots=True)
class Context:
    """Numerics of one run, handed to every op."""

    numerics: Numerics = "rounded"

    def bf16(self, x: Tensor) -> Tensor:
        """A rounding point: to BF16, nearest, ties to even. FP32 numerics keep ``x`` in FP32."""
        return x.to(torch.bfloat16) if self.numerics == "rounded" else x.float()

    def store(self, x: Tensor, dtype: str) -> Tensor:
        """``x`` in the output dtype an op states, ``bf16`` or ``f32``."""
        return self.bf16(x) if dtype == "bf16" else x.float()
