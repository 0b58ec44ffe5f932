"""NVFP4 safetensors in ModelOpt's layout: each packed tensor X beside its X_scale and X_scale_2.

X is u8 [..., N, K/2] (codes), X_scale F8_E4M3 [..., N, K/16] (block scales), X_scale_2 f32, one value or one per
stacked expert (tensor scale).
"""

from __future__ import annotations

import torch

from flintc.checkpoint.assemble import PackedAssembly
from flintc.checkpoint.checkpoint import WeightsFormat
from flintc.checkpoint.reading import Extent, SliceReader
from flintc.checkpoint.safetensors import PACKED_SCALE, SafetensorsCheckpoint
from flintc.checkpoint.weights import Shape, StoredWeight
from flintc.errors import CheckpointError
from flintc.reference.nvfp4 import BLOCK, Nvfp4

#: Suffixes of a packed tensor's companions.
SCALE, SCALE_2 = PACKED_SCALE, "_scale_2"
INPUT_SCALE = ".input_scale"


class ModeloptCheckpoint(SafetensorsCheckpoint):
    """An opened folder of packed safetensors; see :class:`flintc.checkpoint.Checkpoint`."""

    weights_format: WeightsFormat = "nvfp4"

    def _shapes(self) -> dict[str, Shape]:
        """Shapes in values; companions are not weights. CheckpointError where a companion is missing or misshapen."""
        for name in self.tensors:
            if name.endswith(INPUT_SCALE):
                message = f"{self.path}: {name} is not supported: it scales activations for quantised arithmetic"
                raise CheckpointError(message, remedy="use a weight-only NVFP4 checkpoint")
        packed = [name for name in self.tensors if f"{name}{SCALE}" in self.tensors]
        companions = {f"{name}{suffix}" for name in packed for suffix in (SCALE, SCALE_2)}
        shapes = {name: tensor.shape for name, tensor in self.tensors.items() if name not in companions}
        for name in packed:
            shapes[name] = self._packed_shape(self.tensors[name])
        return shapes

    def _packed_shape(self, codes: Extent) -> Shape:
        if codes.kind != "U8" or len(codes.shape) not in (2, 3) or codes.shape[-1] * 2 % BLOCK:
            raise self._misfit(codes, f"U8[N, K/2] with K a multiple of {BLOCK}")
        *rows, half = codes.shape
        scales = self.tensors[f"{codes.name}{SCALE}"]
        if scales.kind != "F8_E4M3" or scales.shape != (*rows, half * 2 // BLOCK):
            raise self._misfit(scales, f"F8_E4M3{[*rows, half * 2 // BLOCK]}")
        scale = self.tensors.get(f"{codes.name}{SCALE_2}")
        if scale is None:
            raise CheckpointError(f"{codes.file.path}: missing tensor {codes.name}{SCALE_2}", remedy="fetch it again")
        experts = rows[0] if len(rows) == 2 else 1
        if scale.kind != "F32" or scale.shape not in ((), (1,), (experts,)):
            raise self._misfit(scale, f"F32[] or F32[{experts}]")
        return (*rows, half * 2)

    def _misfit(self, tensor: Extent, expected: str) -> CheckpointError:
        found = f"{tensor.kind}{list(tensor.shape)}"
        return CheckpointError(f"{tensor.file.path}: tensor {tensor.name} is {found}, expected {expected}")

    def _check_types(self, weight: StoredWeight) -> None:
        packed = [piece.tensor for piece in weight.pieces if f"{piece.tensor}{SCALE}" in self.tensors]
        wanted = weight.value.type.dtype == "nvfp4"
        if not wanted and not packed:
            super()._check_types(weight)
        elif not wanted:
            raise CheckpointError(
                f"{self.path}: {packed[0]} is NVFP4, the model asks for {weight.value.type.dtype}",
                remedy="compile for nvfp4, or pass a BF16 checkpoint",
            )
        elif len(packed) < len(weight.pieces):
            plain = next(piece.tensor for piece in weight.pieces if piece.tensor not in packed)
            message = f"{self.path}: {plain} is {self.tensors[plain].kind}, expected NVFP4"
            raise CheckpointError(message, remedy="convert the whole checkpoint to NVFP4")

    def extents(self, weight: StoredWeight) -> list[Extent]:
        """Each tensor, followed by its companions where it is packed."""
        suffixes = ("", SCALE, SCALE_2) if weight.value.type.dtype == "nvfp4" else ("",)
        return [self.tensors[f"{piece.tensor}{suffix}"] for piece in weight.pieces for suffix in suffixes]

    def _packed(self, weight: StoredWeight, source: SliceReader, device: torch.device | str) -> Nvfp4:
        """CheckpointError where a scale is negative or no number."""
        assembly = PackedAssembly(weight, device)
        for piece in weight.pieces:
            codes, scales, scale = (self.tensors[f"{piece.tensor}{suffix}"] for suffix in ("", SCALE, SCALE_2))
            for units, data in source.parts(codes):
                assembly.put_codes(piece, units, data)
            for units, data in source.parts(scales):
                if bool(((data > 0x80) | (data == 0x7F)).any()):
                    raise CheckpointError(f"{self.path}: {scales.name} holds a scale that is negative or not a number")
                assembly.put_scales(piece, units, data & 0x7F)
            value = source.whole(scale).view(torch.float32)
            if not bool((torch.isfinite(value) & (value >= 0)).all()):
                raise CheckpointError(f"{self.path}: {scale.name} is {value.tolist()[:4]}, no scale")
            assembly.put_scale(piece, value)
        return assembly.finish()
