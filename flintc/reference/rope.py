"""Cosines and sines for the rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: int, head_dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """Angles of positions 0 .. positions-1: f32[positions, 2, head_dim/2], cosines then sines.

    The frequency of channel pair i is theta ** (-2i / head_dim). Computed in FP32 on the CPU whatever ``device``
    is, so that the bits do not depend on where the model runs.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)
