"""Parts of stored tensors put in their places in a weight of the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from flintc.checkpoint.reading import in_shape
from flintc.checkpoint.weights import Piece, StoredWeight
from flintc.reference.nvfp4 import BLOCK, Nvfp4


class PlainAssembly:
    """A BF16 or FP32 weight whose pieces arrive part by part."""

    def __init__(self, weight: StoredWeight, dtype: torch.dtype, device: torch.device | str) -> None:
        self.whole = torch.empty(weight.shape, dtype=dtype, device=device)

    def put(self, piece: Piece, units: slice, data: Tensor, stored: torch.dtype) -> None:
        """Values of the part ``units`` of the first axis of ``piece``, from their bytes: u8 [units, n]."""
        target = self.whole if piece.expert is None else self.whole[piece.expert]
        target = target[..., piece.rows, :] if target.ndim > 1 else target[piece.rows]
        target[units] = in_shape(data, stored, target.shape[1:])


class PackedAssembly:
    """An NVFP4 weight whose pieces arrive part by part: codes, block scales, and each piece's tensor scales."""

    def __init__(self, weight: StoredWeight, device: torch.device | str) -> None:
        rows, columns = weight.shape[:-1], weight.shape[-1]
        self._codes = torch.empty((*rows, columns // 2), dtype=torch.uint8, device=device)
        self._scales = torch.empty((*rows, columns // BLOCK), dtype=torch.uint8, device=device)
        self._scale = torch.empty(rows, dtype=torch.float32, device=device)

    def put_codes(self, piece: Piece, units: slice, codes: Tensor) -> None:
        """u8 [units, ..., K/2] or as many bytes, in the part ``units`` of the first axis of ``piece``."""
        _put(self._codes, piece, units, codes)

    def put_scales(self, piece: Piece, units: slice, scales: Tensor) -> None:
        """u8 [units, ..., K/16] or as many bytes."""
        _put(self._scales, piece, units, scales)

    def put_scale(self, piece: Piece, scale: Tensor) -> None:
        """f32: one value for all of ``piece``, one per expert [E], or as many as it has output rows."""
        rows = (self._scale if piece.expert is None else self._scale[piece.expert])[..., piece.rows]
        if scale.numel() == rows.numel():
            rows[:] = scale.reshape(rows.shape)
        else:
            rows[:] = scale[:, None] if rows.ndim == 2 and scale.numel() > 1 else scale

    def finish(self) -> Nvfp4:
        """The weight. Its tensor scale has one value per expert (or one in all), or, where the pieces of an expert
        differ in theirs, one per output row: scales are kept, never averaged.
        """
        return Nvfp4(self._codes, self._scales, narrow(self._scale))


def narrow(scale: Tensor) -> Tensor:
    """A scale per row [N] or [E, N] as one in all [1] or one per expert [E], where rows agree."""
    first = scale[..., :1]
    if bool((scale == first).all()):
        return first.flatten().clone()
    return scale


def _put(whole: Tensor, piece: Piece, units: slice, data: Tensor) -> None:
    target = (whole if piece.expert is None else whole[piece.expert])[..., piece.rows, :][units]
    target[:] = data.reshape(target.shape)
