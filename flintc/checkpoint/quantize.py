"""BF16 to NVFP4: for each block of 16 values, the block scale with the least squared error under the tensor scale."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flintc.reference.nvfp4 import BLOCK, E2M1, Nvfp4

LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0
_LARGEST_BYTE = 0x7E
#: Magnitudes of codes 0..7, and the values halfway between neighbours.
_LEVELS = E2M1[:8]
_MIDDLES = tuple((a + b) / 2 for a, b in pairwise(_LEVELS))
#: Values searched at once: bounds memory, and fits a cache.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """How far a packed tensor is from its original.

    relative: square root of (sum of squared errors / sum of squares), 0 for an all-zero tensor.
    largest: the largest absolute error.
    """

    relative: float
    largest: float


def largest_magnitude(weight: Tensor) -> Tensor:
    """Of each matrix in ``weight`` [N, K] or [E, N, K]: [1] or [E]; NaN where it has one. Makes no copy of it."""
    axes = (weight.ndim - 2, weight.ndim - 1)
    return torch.maximum(weight.amax(axes), -weight.amin(axes)).reshape(-1)


def tensor_scale(largest: Tensor) -> Tensor:
    """The FP32 tensor scale for weights of magnitude up to ``largest``: the whole range of code times block scale.

    One value per element of ``largest``; 1 where that is zero.
    """
    scale = largest.float() / (LARGEST_CODE * LARGEST_SCALE)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize(weight: Tensor, scale: Tensor) -> Nvfp4:
    """Pack ``weight`` [N, K] or [E, N, K] (BF16 or FP32, finite; K a multiple of 16) under the given tensor scale.

    scale: f32, one value, or one per expert ([E]). Every block scale is the best of all 127, see ``_best_scales``.
    ValueError where a value is not finite.
    """
    if not bool(torch.isfinite(largest_magnitude(weight)).all()):
        raise ValueError("a value is not finite")
    spread = scale.reshape(-1, 1, 1) if weight.ndim == 3 else scale.reshape(1, 1)
    rows = spread.expand(*weight.shape[:-1], 1).reshape(-1, 1)
    flat = weight.reshape(-1, weight.shape[-1])
    step = max(1, _CHUNK // weight.shape[-1])
    parts = [_quantize_rows(flat[i : i + step], rows[i : i + step]) for i in range(0, len(flat), step)]
    codes, scales = (torch.cat(p).reshape(*weight.shape[:-1], -1) for p in zip(*parts, strict=True))
    return Nvfp4(codes, scales, scale)


def quantization_error(weight: Tensor, packed: Nvfp4) -> QuantizationError:
    """Error of ``packed`` as a stand-in for ``weight``, in chunks of rows to bound memory."""
    columns = weight.shape[-1]
    rows, scale = weight.reshape(-1, columns), packed.row_scale().reshape(-1)
    codes, scales = packed.codes.reshape(-1, columns // 2), packed.scales.reshape(-1, columns // BLOCK)
    lost, whole, largest = 0.0, 0.0, 0.0
    step = max(1, _CHUNK // columns)
    for i in range(0, len(rows), step):
        original = rows[i : i + step].double()
        stand_in = Nvfp4(codes[i : i + step], scales[i : i + step], scale[i : i + step]).dequantize()
        difference = stand_in.double() - original
        lost += float(difference.square().sum())
        whole += float(original.square().sum())
        largest = max(largest, float(difference.abs().max()))
    return QuantizationError((lost / whole) ** 0.5 if whole else 0.0, largest)


def _quantize_rows(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes u8 [R, K/2] and scales u8 [R, K/16] of weight [R, K] with tensor scales [R, 1]."""
    values = (weight.float() / scale).reshape(len(weight), -1, BLOCK)
    scales = _best_scales(values.abs())
    codes = _nearest(values.abs(), scales)
    codes |= (values < 0).to(torch.uint8) << 3
    codes.masked_fill_(codes == 8, 0)  # minus zero
    low, high = codes.flatten(1)[:, 0::2], codes.flatten(1)[:, 1::2]
    return low | high << 4, scales


def _best_scales(magnitudes: Tensor) -> Tensor:
    """E4M3 bytes u8 [R, B] of least squared error for magnitudes f32 [R, B, 16].

    Let b be the smallest byte that clips nothing. Doubling a scale keeps every level up to the old largest one or
    drops it, so it cannot help once nothing is clipped: above b, only scales below twice b's need a look (bytes up
    to b + 7), and those whose half is no E4M3 number (bytes up to 15). Below b, clipping the block's largest value
    alone costs (largest - 6 * scale)^2, which ends the search where that exceeds the best error found.
    """
    numbers = torch.arange(_LARGEST_BYTE + 1, dtype=torch.uint8, device=magnitudes.device)
    numbers = numbers.view(torch.float8_e4m3fn).float()
    largest = magnitudes.amax(-1)
    start = torch.searchsorted(numbers * LARGEST_CODE, largest).clamp(1, _LARGEST_BYTE)
    best = start.to(torch.uint8)
    least = _squared_error(magnitudes, best)

    def consider(candidates: Tensor, live: Tensor) -> None:
        error = _squared_error(magnitudes, candidates.to(torch.uint8))
        better = live & (error < least)
        torch.where(better, candidates.to(torch.uint8), best, out=best)
        torch.where(better, error, least, out=least)

    stop = torch.maximum(start + 7, torch.full_like(start, 15)).clamp(max=_LARGEST_BYTE)
    for up in range(1, int((stop - start).max()) + 1):
        consider((start + up).minimum(stop), start + up <= stop)
    for down in range(1, _LARGEST_BYTE):
        candidates = (start - down).clamp(min=1)
        clipped = (largest - LARGEST_CODE * numbers[candidates]).clamp(min=0)
        live = (start - down >= 1) & (clipped.square() < least)
        if not bool(live.any()):
            break
        consider(candidates, live)
    return best.masked_fill_(largest == 0, 0)


def _nearest(magnitudes: Tensor, scales: Tensor) -> Tensor:
    """Codes 0..7 nearest to ``magnitudes`` [R, B, 16] under block scales [R, B]; all zero where a scale is."""
    middles = torch.tensor(_MIDDLES, device=magnitudes.device)
    return torch.bucketize(magnitudes / _spread(scales), middles).to(torch.uint8)


def _squared_error(magnitudes: Tensor, scales: Tensor) -> Tensor:
    """Sum of squared errors per block, f32 [R, B], each value at its nearest level."""
    spread = _spread(scales)
    x = magnitudes / spread
    # Levels are 0.5 apart up to 2, 1 apart up to 4, 2 apart up to 6: several times faster than a look-up.
    levels = x.clamp(max=2).mul_(2).round_().mul_(0.5)
    levels += x.clamp(2, 4).sub_(2).round_()
    levels += x.clamp_(4, 6).sub_(4).mul_(0.5).round_().mul_(2)
    return levels.mul_(spread).sub_(magnitudes).square_().sum(-1)


def _spread(scales: Tensor) -> Tensor:
    """Block scales as numbers f32 [R, B, 1]; the smallest positive one in place of zero."""
    return scales.view(torch.float8_e4m3fn).float().clamp(min=2.0**-9)[..., None]
