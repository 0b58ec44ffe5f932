"""Quantisation to NVFP4, against a search over all scales and codes written in plain numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flintc.checkpoint.quantize import quantization_error, quantize, tensor_scale
from flintc.reference.nvfp4 import Nvfp4

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


ALL_SCALES = np.array([e4m3(b) for b in range(0x7F)])


def least_error(block: np.ndarray) -> float:
    """Least squared error of a block of 16 over every scale and every choice of codes."""
    grid = ALL_SCALES[:, None] * LEVELS
    errors = np.abs(np.abs(block)[None, :, None] - grid[:, None, :]).min(-1)
    return float(np.square(errors).sum(-1).min())


def error_of(weight: torch.Tensor, packed: Nvfp4) -> np.ndarray:
    """Squared error per block in units of the tensor scale, [rows, blocks]."""
    difference = packed.unscaled().double() - weight.double() / packed.scale.double()
    return difference.square().unflatten(-1, (-1, 16)).sum(-1).numpy()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-24, 9), st.sampled_from(["normal", "heavy", "one", "flat"]))
def test_each_block_has_the_least_error_of_all_scales(seed: int, exponent: float, kind: str) -> None:
    random = np.random.default_rng(seed)
    blocks = {
        "normal": random.standard_normal((4, 16)),
        "heavy": random.standard_t(1.5, (4, 16)),
        "one": np.where(np.arange(16) == 3, 1.0, 1e-3 * random.standard_normal((4, 16))),
        "flat": random.choice([-1.0, 1.0], (4, 16)) * random.uniform(0.9, 1.1, (4, 1)),
    }[kind]
    weight = torch.tensor(blocks * 2.0**exponent, dtype=torch.float32)
    packed = quantize(weight, torch.tensor(1.0))
    got = error_of(weight, packed)[:, 0]
    best = np.array([least_error(b) for b in weight.double().numpy()])
    np.testing.assert_allclose(got, best, rtol=1e-5, atol=1e-12 * 4.0**exponent)


def test_what_is_representable_is_exact() -> None:
    random = np.random.default_rng(1)
    codes = torch.from_numpy(random.integers(0, 256, (64, 64), dtype=np.uint8))
    scales = torch.from_numpy(random.integers(0, 0x7F, (64, 8), dtype=np.uint8))
    weight = Nvfp4(codes, scales, torch.tensor(0.25)).dequantize()
    again = quantize(weight, torch.tensor(0.25))
    assert torch.equal(again.dequantize(), weight)


@pytest.mark.parametrize("byte", [9, 11, 13, 15])
def test_a_subnormal_block_may_need_a_scale_whose_half_is_no_number(byte: int) -> None:
    """0.5 * scale is exact here, and no other scale below 16 * 2^-9 has the value among its multiples."""
    weight = torch.full((1, 16), byte * 2.0**-10)
    assert torch.equal(quantize(weight, torch.tensor(1.0)).dequantize(), weight)


def test_tensor_scale_spans_the_range() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    scale = tensor_scale(weight.abs().amax())
    packed = quantize(weight, scale)
    assert torch.equal(scale, weight.float().abs().amax() / 2688)
    assert int(packed.scales.max()) >= 0x7C  # the block with the largest value uses the top of the scale's range
    error = quantization_error(weight, packed)
    assert 0.05 < error.relative < 0.12
    assert error.largest == pytest.approx(float((packed.dequantize() - weight.float()).abs().max()))


def test_experts_have_their_own_scale() -> None:
    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 50.0]).view(
        3, 1, 1
    )
    scale = tensor_scale(weight.abs().amax((1, 2)))
    packed = quantize(weight, scale)
    assert packed.scale.shape == (3,)
    for i in range(3):
        alone = quantize(weight[i], scale[i])
        assert torch.equal(packed.codes[i], alone.codes) and torch.equal(packed.scales[i], alone.scales)
        assert quantization_error(weight[i], alone).relative < 0.12


def test_zeros_and_signs() -> None:
    weight = torch.zeros(2, 32)
    weight[1, :2] = torch.tensor([-1e-9, 6.0])
    packed = quantize(weight, tensor_scale(weight[0].abs().amax()))
    assert float(packed.scale) == 1.0
    assert packed.codes[0].tolist() == [0] * 16 and packed.scales[0].tolist() == [0, 0]
    assert packed.codes[1].tolist() == [0x70] + [0] * 15  # what rounds to zero is plus zero
    assert packed.dequantize()[1, :2].tolist() == [0.0, 6.0]


def test_rows_longer_than_a_chunk_and_chunk_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight, torch.tensor(0.01))
    monkeypatch.setattr("flintc.checkpoint.quantize._CHUNK", 100)
    parts = quantize(weight, torch.tensor(0.01))
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.zeros(1, 16)
    weight[0, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, torch.tensor(1.0))
