"""NVFP4 weights in ModelOpt's layout, or with its codes in the order of kernels, and their exact dequantisation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flintc.reference.kernel_order import from_kernel_order, to_kernel_order_

#: Values per E4M3 block scale.
BLOCK = 16

#: Value of each 4-bit code (E2M1). Code 8 is negative zero.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Nvfp4:
    """A packed weight of logical shape [N, K], or [E, N, K] for stacked experts.

    codes: u8 [..., N, K/2]; byte i of a row holds value 2i in its low nibble and 2i+1 in its high nibble.
    scales: u8 [..., N, K/16]; the bits of one E4M3 number per 16 values.
    scale: f32, the tensor scale: one value ([] or [1]), one per output row ([N]), one per expert ([E]) or
    one per expert and row ([E, N]).
    ordered: codes and block scales stand in the order in which kernels read them instead, see
    :mod:`flintc.reference.kernel_order`.
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor
    ordered: bool = False

    def __post_init__(self) -> None:
        rows, half = self.codes.shape[:-1], self.codes.shape[-1]
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.uint8 or self.scale.dtype != torch.float32:
            raise ValueError(f"dtypes are {self.codes.dtype}, {self.scales.dtype}, {self.scale.dtype}")
        if self.codes.ndim not in (2, 3) or half * 2 % BLOCK or self.scales.shape != (*rows, half * 2 // BLOCK):
            raise ValueError(f"codes are {list(self.codes.shape)}, scales {list(self.scales.shape)}")
        if self.scale.numel() != 1 and self.scale.shape not in (rows, rows[:-1]):
            raise ValueError(f"scale is {list(self.scale.shape)} for rows {list(rows)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, in values."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def device(self) -> torch.device:
        """Where the codes live."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.codes.nbytes + self.scales.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str) -> Nvfp4:
        """The same weight on another device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), scale=self.scale.to(device))

    def __getitem__(self, expert: int) -> Nvfp4:
        """One expert of a stacked weight."""
        scale = self.scale if self.scale.numel() == 1 else self.scale[expert]
        return replace(self, codes=self.codes[expert], scales=self.scales[expert], scale=scale)

    def row_scale(self) -> Tensor:
        """The tensor scale spread over output rows: f32 [..., N]."""
        rows = self.codes.shape[:-1]
        if self.scale.numel() == 1:
            return self.scale.reshape(()).expand(rows)
        if self.scale.shape == rows:
            return self.scale
        return self.scale[..., None].expand(rows)

    def with_row_scales(self) -> Nvfp4:
        """The same weight with its tensor scale spread over output rows, as kernels read it."""
        return replace(self, scale=self.row_scale().contiguous())

    def in_kernel_order(self, *, give_up: bool = False) -> Nvfp4:
        """The same weight, ordered; ``give_up``: in the memory of this one, which is not used again."""
        if self.ordered:
            return self
        codes, scales = (self.codes, self.scales) if give_up else (self.codes.clone(), self.scales.clone())
        to_kernel_order_(codes, scales)
        return replace(self, codes=codes, scales=scales, ordered=True)

    def unscaled(self) -> Tensor:
        """code * block scale, without the tensor scale: bf16 [..., N, K], exact."""
        table = torch.tensor(E2M1, dtype=torch.float32, device=self.device)
        codes, scales = self.codes, self.scales
        if self.ordered:
            codes, scales = from_kernel_order(codes, scales)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        blocks = table[nibbles.int()].view(*scales.shape, BLOCK)
        values = blocks * scales.view(torch.float8_e4m3fn).float()[..., None]
        return values.flatten(-2).to(torch.bfloat16)

    def dequantize(self) -> Tensor:
        """code * block scale * tensor scale: f32 [..., N, K], one rounding to FP32."""
        values: Tensor = self.unscaled().float() * self.row_scale()[..., None]
        return values
