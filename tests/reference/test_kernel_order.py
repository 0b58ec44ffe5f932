"""The order in which kernels read packed weights: a permutation of bits that loses nothing."""

from __future__ import annotations

import pytest
import torch

from flintc.ir.packed import BLOCK_COLUMNS, in_blocks
from flintc.reference import Nvfp4, kernel_order
from flintc.reference.kernel_order import from_kernel_order, to_kernel_order_

#: Rows and columns of weights in blocks, and of weights that are not.
SHAPES = [(16, 128), (48, 384), (16, 64), (8, 128)]


def packed(*shape: int) -> Nvfp4:
    """A random weight, its scales positive."""
    *rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (*rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x78, (*rows, columns // 16), dtype=torch.uint8, generator=generator)
    return Nvfp4(codes, scales, torch.tensor(0.5))


def test_every_bit_of_a_word_has_a_place_of_its_own() -> None:
    bits = torch.tensor([1 << i if i < 31 else -(1 << 31) for i in range(32)], dtype=torch.int32).view(32, 1)
    moved = bits.clone()
    to_kernel_order_(moved.view(torch.uint8), torch.zeros((32, 1), dtype=torch.uint8))
    assert sorted(moved.flatten().tolist()) == sorted(bits.flatten().tolist())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_lies_together(shape: tuple[int, int]) -> None:
    """Lane 4r + t of a warp finds the scales of row r and columns 32t on at its number, and 16 bytes of codes."""
    rows, lanes = shape[0], shape[1] // 32
    names = torch.arange(rows * lanes)
    scales = names.to(torch.int16).view(torch.uint8).view(rows, -1).clone()
    # No bit of a word of zeros or of ones moves: eight lanes' worth of each tell the lanes of a block apart.
    codes = (names // 3 % 2 * 255).to(torch.uint8)[:, None].expand(-1, 16).reshape(rows, -1).contiguous()
    to_kernel_order_(codes, scales)
    found, words = scales.view(-1).view(torch.int16), codes.view(-1, 16)
    for row in range(rows):
        for lane in range(lanes):
            at = row * lanes + lane
            if in_blocks(*shape):
                at = row // 8 * 8 * lanes + lane // 4 * 32 + row % 8 * 4 + lane % 4
            name = row * lanes + lane
            assert found[at] == name and (words[at] == name // 3 % 2 * 255).all()


@pytest.mark.parametrize("part", [1 << 22, 7])
@pytest.mark.parametrize("shape", [(3, *s) for s in SHAPES])
def test_there_and_back(shape: tuple[int, ...], part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_order, "_PART", part)
    weight = packed(*shape)
    codes, scales = weight.codes.clone(), weight.scales.clone()
    to_kernel_order_(codes, scales)
    assert not torch.equal(codes, weight.codes)
    assert torch.equal(scales, weight.scales) != (in_blocks(*shape[1:]) and shape[-1] > BLOCK_COLUMNS)
    back = from_kernel_order(codes, scales)
    assert torch.equal(back[0], weight.codes) and torch.equal(back[1], weight.scales)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_has_the_same_values_in_either_order(shape: tuple[int, int]) -> None:
    weight = packed(2, *shape)
    before = weight.codes.clone(), weight.scales.clone()
    ordered = weight.in_kernel_order()
    assert ordered.ordered and not weight.ordered and ordered.in_kernel_order() is ordered
    assert torch.equal(weight.codes, before[0]) and torch.equal(weight.scales, before[1]), "the weight was changed"
    for one, other in ((weight, ordered), (weight[1], ordered[1]), (weight, ordered.to("cpu").with_row_scales())):
        assert torch.equal(one.dequantize(), other.dequantize())
    given_up = weight.in_kernel_order(give_up=True)
    assert given_up.codes.data_ptr() == weight.codes.data_ptr() and torch.equal(given_up.codes, ordered.codes)
