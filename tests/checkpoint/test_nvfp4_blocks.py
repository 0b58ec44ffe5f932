"""ggml blocks <-> ModelOpt layout, against gguf's dequantiser, which shares nothing with the repack."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flintc.checkpoint.nvfp4 import ScaleError, from_ggml, to_ggml
from flintc.reference.nvfp4 import Nvfp4

#: Every scale byte that means a number, the sign bit and the NaN bits that ggml reads as zero included.
SCALES = np.arange(0xFF, dtype=np.uint8)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CANONICAL = np.arange(0x7F, dtype=np.uint8)


def every_code_at_every_place(scales: np.ndarray) -> np.ndarray:
    """u8 [16 * len(scales), 36]: block c * len + s has scale s in all four groups and code (c + place) % 16."""
    places = np.arange(64)
    group, within = places // 16, places % 16
    byte, high = 4 + 8 * group + within % 8, within // 8
    blocks = np.zeros((16, len(scales), 36), dtype=np.uint8)
    blocks[..., :4] = scales[:, None]
    for code in range(16):
        for place in range(64):
            blocks[code, :, byte[place]] |= np.uint8((code + place) % 16 << 4 * high[place])
    return blocks.reshape(-1, 36)


def gguf_values(blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)


def our_values(blocks: np.ndarray, scale: float = 1.0) -> np.ndarray:
    codes, scales = from_ggml(torch.from_numpy(blocks))
    return Nvfp4(codes, scales, torch.tensor(scale)).dequantize().numpy()


def test_every_code_times_every_scale_equals_gguf() -> None:
    blocks = every_code_at_every_place(SCALES)
    expected = gguf_values(blocks)
    assert np.unique(expected.reshape(16, 0xFF, 64)[:, 0x38]).tolist() == sorted(
        {s * v for s in (1, -1) for v in VALUES}
    )
    # As numbers: gguf reads code 8 as +0.0, we keep the bits of -0.0.
    np.testing.assert_array_equal(our_values(blocks), expected)


def test_rows_of_several_blocks_and_stacked_experts() -> None:
    blocks = np.random.default_rng(0).integers(0, 255, (3, 5, 4 * 36), dtype=np.uint8)
    np.testing.assert_array_equal(our_values(blocks), gguf_values(blocks))


def test_unscaled_product_is_exact_in_bf16() -> None:
    blocks = every_code_at_every_place(CANONICAL)
    codes, scales = from_ggml(torch.from_numpy(blocks))
    exact = Nvfp4(codes, scales, torch.tensor(1.0)).unscaled().float().numpy()
    np.testing.assert_array_equal(exact, gguf_values(blocks))


def test_blocks_come_back_bit_for_bit_when_canonical() -> None:
    blocks = torch.from_numpy(every_code_at_every_place(CANONICAL))
    assert torch.equal(to_ggml(*from_ggml(blocks)), blocks)


def test_blocks_come_back_as_numbers_otherwise() -> None:
    blocks = every_code_at_every_place(SCALES)
    back = to_ggml(*from_ggml(torch.from_numpy(blocks))).numpy()
    np.testing.assert_array_equal(gguf_values(back), gguf_values(blocks))
    assert back[:, :4].max() <= 0x7E
    np.testing.assert_array_equal(back[:, 4:], blocks[:, 4:])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_layout_round_trip(rows: int, blocks: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = torch.from_numpy(random.integers(0, 256, (rows, blocks * 32), dtype=np.uint8))
    scales = torch.from_numpy(random.integers(0, 0x7F, (rows, blocks * 4), dtype=np.uint8))
    again = from_ggml(to_ggml(codes, scales))
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.gpu
def test_what_the_gpu_repacks_equals_gguf() -> None:
    """Every code at every place times every scale byte, repacked and dequantised there."""
    blocks = every_code_at_every_place(SCALES)
    codes, scales = from_ggml(torch.from_numpy(blocks).cuda())
    values = Nvfp4(codes, scales, torch.tensor(1.0, device="cuda")).dequantize()
    assert values.is_cuda
    np.testing.assert_array_equal(values.cpu().numpy(), gguf_values(blocks))


@pytest.mark.gpu
def test_the_gpu_repacks_to_the_same_bytes() -> None:
    blocks = torch.from_numpy(every_code_at_every_place(SCALES))
    on_gpu = from_ggml(blocks.cuda())
    for ours, theirs in zip(on_gpu, from_ggml(blocks), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(to_ggml(*on_gpu).cpu(), to_ggml(*from_ggml(blocks)))
    with pytest.raises(ScaleError, match="0xFF"):
        from_ggml(torch.full((1, 36), 0xFF, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("group", range(4))
def test_nan_scale_is_refused(group: int) -> None:
    blocks = torch.zeros(2, 72, dtype=torch.uint8)
    blocks[1, 36 + group] = 0xFF
    with pytest.raises(ScaleError, match="0xFF"):
        from_ggml(blocks)


@pytest.mark.parametrize("scale", [0x7F, 0x81, 0xBF, 0xFE, 0xFF])
def test_scales_that_a_block_cannot_hold_are_refused(scale: int) -> None:
    scales = torch.full((1, 4), 0x38, dtype=torch.uint8)
    scales[0, 2] = scale
    with pytest.raises(ScaleError, match="negative or not a number"):
        to_ggml(torch.zeros(1, 32, dtype=torch.uint8), scales)


def test_minus_zero_scale_becomes_zero() -> None:
    scales = torch.full((1, 4), 0x80, dtype=torch.uint8)
    assert to_ggml(torch.full((1, 32), 0x77, dtype=torch.uint8), scales)[0, :4].tolist() == [0, 0, 0, 0]
