"""Element types, symbolic dimensions and tensor types of the IR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

DType = Literal["bf16", "f32", "i32", "nvfp4"]
DTYPES: tuple[DType, ...] = get_args(DType)

#: Bits per element in device memory. NVFP4 is 4-bit codes plus one 8-bit E4M3 scale per 16 values;
#: the FP32 tensor scale is one value per tensor (or expert) and is not counted.
BITS: dict[DType, float] = {"bf16": 16, "f32": 32, "i32": 32, "nvfp4": 4.5}

#: A dimension is a number, or a product of numbers and run-time symbols such as ``"6*B"``.
#: Symbols: ``B`` rows of the step, ``P`` KV pages of one layer, ``Q`` sequence slots,
#: ``T`` block-table columns, ``C`` positions covered by the RoPE tables.
Dim = int | str
Shape = tuple[Dim, ...]
SYMBOLS = ("B", "P", "Q", "T", "C")


def resolve(dim: Dim, env: Mapping[str, int]) -> int:
    """Value of ``dim`` with every symbol taken from ``env``; KeyError names a missing symbol."""
    if isinstance(dim, int):
        return dim
    return prod(int(f) if f.isdigit() else env[f] for f in dim.split("*"))


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape of a value."""

    dtype: DType
    shape: Shape

    def size(self, env: Mapping[str, int]) -> int:
        """Number of elements under ``env``."""
        return prod(resolve(d, env) for d in self.shape)

    def nbytes(self, env: Mapping[str, int]) -> int:
        """Bytes in device memory under ``env``."""
        return int(self.size(env) * BITS[self.dtype]) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
