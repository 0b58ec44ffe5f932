"""Stored NVFP4 tensors put together to the packed weight of a graph, each with its own tensor scale."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flintc.checkpoint.weights import Piece, StoredWeight
from flintc.reference.nvfp4 import BLOCK, Nvfp4


def assemble(weight: StoredWeight, pieces: Iterable[tuple[Piece, Nvfp4]], device: torch.device | str) -> Nvfp4:
    """The weight that ``pieces`` fill, on ``device``; one piece is in memory at a time if ``pieces`` is lazy.

    Its tensor scale has one value per expert (or one in all), or, where the pieces of an expert differ in theirs,
    one per output row: scales are kept, never averaged.
    """
    rows, columns = weight.shape[:-1], weight.shape[-1]
    codes = torch.empty((*rows, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((*rows, columns // BLOCK), dtype=torch.uint8, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    for piece, part in pieces:
        for whole, values in ((codes, part.codes), (scales, part.scales)):
            _place(whole, piece)[..., piece.rows, :] = values
        _place(scale, piece)[..., piece.rows] = part.row_scale()
    return Nvfp4(codes, scales, _narrow(scale))


def _place(whole: Tensor, piece: Piece) -> Tensor:
    return whole if piece.expert is None else whole[piece.expert]


def _narrow(scale: Tensor) -> Tensor:
    """A scale per row [N] or [E, N] as one in all [1] or one per expert [E], where rows agree."""
    first = scale[..., :1]
    if bool((scale == first).all()):
        return first.flatten().clone()
    return scale
