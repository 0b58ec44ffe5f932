"""Products of many rows with dense weights, by torch: BF16 operands, FP32 sums, the tensor scale on the sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Ranges of output rows with a tensor scale of their own, at most: beyond, the scale is a separate multiplication.
MOST_SCALES = 4

#: (first row, last row + 1, scale)
ScaleRange = tuple[int, int, float]


@contextmanager
def full_sums() -> Iterator[None]:
    """cuBLAS may not round partial sums to BF16."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = before


def scale_ranges(scale: Tensor) -> list[ScaleRange]:
    """Ranges of equal tensor scales of a weight's rows, f32 [N]."""
    values, counts = torch.unique_consecutive(scale, return_counts=True)
    ends = counts.cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, values.tolist(), strict=True))


def product(x: Tensor, weight: Tensor, dtype: torch.dtype, scales: list[ScaleRange] | None = None) -> Tensor:
    """x [T, K] times the rows of weight [N, K], both BF16: [T, N] of ``dtype``, BF16 or FP32, rounded once.

    scales: what the FP32 sums of each range of rows are multiplied by; they cover all rows.
    """
    if x.device.type == "cpu":
        return _on_cpu(x, weight, scales).to(dtype)
    if dtype == torch.float32 or (scales is not None and len(scales) > MOST_SCALES):
        y = torch.mm(x, weight.T, out_dtype=torch.float32)
        for first, end, scale in scales or ():
            y[:, first:end] *= scale
        return y.to(dtype)
    if scales is None:
        return torch.mm(x, weight.T)
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    for first, end, scale in scales:
        part = y[:, first:end]
        torch.addmm(part, x, weight[first:end].T, beta=0, alpha=scale, out=part)
    return y


def _on_cpu(x: Tensor, weight: Tensor, scales: list[ScaleRange] | None) -> Tensor:
    """The same function for tests: torch's CPU products in BF16 round where they like."""
    y = x.float() @ weight.float().T
    for first, end, scale in scales or ():
        y[:, first:end] *= scale
    return y


def bf16_parts(weight: Tensor, parts: int) -> Tensor:
    """FP32 weight [N, K] as the sum of ``parts`` BF16 matrices, the largest first: [parts * N, K]; exact for three."""
    rest, made = weight.float(), []
    for _ in range(parts):
        made.append(rest.to(torch.bfloat16))
        rest = rest - made[-1].float()
    return torch.cat(made)


def in_word_order(weight: Tensor) -> Tensor:
    """Columns of weight [N, K] as packed weights are multiplied: see flintc/codegen/device/grouped_packed.py."""
    rows, columns = weight.shape
    # Axes of a column: lane, word, instruction, half, pair.
    return weight.view(rows, columns // 128, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 4, 2, 6).reshape(rows, columns)
