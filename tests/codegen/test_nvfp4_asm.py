"""The assembly that unpacks NVFP4 weights, run word by word: the interpreter of the other tests cannot."""

from __future__ import annotations

import numpy as np
import torch
from ptx_words import assembly_of, bf16, run

from flintc.reference.kernel_order import to_kernel_order_
from flintc.reference.nvfp4 import E2M1

#: Every E4M3 byte but the two NaN.
SCALES = np.array([b for b in range(256) if b & 0x7F != 0x7F], dtype=np.uint32)


def scale_of(byte: np.ndarray) -> torch.Tensor:
    """Size of E4M3 bytes: the sign bit is masked."""
    return torch.from_numpy((byte & 0x7F).astype(np.uint8)).view(torch.float8_e4m3fn).double()


def test_both_scales_of_a_pair() -> None:
    low, high = (a.ravel() for a in np.meshgrid(SCALES, SCALES))
    values = run(assembly_of("nvfp4", "scale_values"), o2=low | (high << 8))
    for operand, byte in (("$0", low), ("$1", high)):
        assert torch.equal(bf16(values[operand]).double(), scale_of(byte) * 2.0**119)


def test_all_codes_of_a_word_times_every_scale() -> None:
    """Outputs by column, each code * scale / 128 to the last bit, of words as loading orders them."""
    random = np.random.default_rng(0)
    words = random.integers(0, 1 << 32, size=(4096, 1), dtype=np.uint32)
    words[:16, 0] = np.arange(16, dtype=np.uint32) * np.uint32(0x11111111)
    codes = torch.from_numpy(words.view(np.uint8).copy())
    to_kernel_order_(codes, torch.zeros((4096, 1), dtype=torch.uint8))
    ordered = codes.numpy().view(np.uint32)
    scales = run(assembly_of("nvfp4", "scale_values"), o2=SCALES)["$0"][None, :]
    values = run(assembly_of("nvfp4", "word_values"), o8=ordered, o9=scales)
    size = scale_of(SCALES)[None, :]
    for column in range(8):
        code = torch.tensor(E2M1, dtype=torch.float64)[(words >> np.uint32(4 * column) & np.uint32(15)).astype(int)]
        assert torch.equal(bf16(values[f"${column}"]).double(), code * size / 128)
        assert not (values[f"${column}"] & 3).any()  # what hold_above relies on
