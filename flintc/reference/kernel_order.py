"""The order in which kernels read NVFP4 weights: a permutation of the bits of ModelOpt's.

Within a word of eight codes: a code becomes BF16 by moving its sign to bit 15 and the rest to bits 8 to 6. In the order
of ModelOpt that takes each pair of codes two shifts and two masks. Here the codes of columns 2i and 2i + 1 lie so that
one rotation of the word brings both to their places in a register's halves, and one mask takes them out; the last pair
takes two. The places that the mask 0x81c081c0 leaves free under rotations by 0, 4 and 10 are what the fourth pair has
to do with.

Among words: blocks of 8 rows and 128 columns lie together (:func:`flintc.ir.packed.in_blocks`), since that is what a
warp loads at once: 512 bytes of codes, and 64 of scales.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flintc.ir.packed import BLOCK_COLUMNS, BLOCK_ROWS, in_blocks

#: Rotation to the left, by pair, that brings a code's bits 3 (the sign), 2, 1 and 0 to bits 15, 8, 7 and 6 of a half.
ROTATIONS = ((0, 0, 0, 0), (4, 4, 4, 4), (10, 10, 10, 10), (14, 14, 14, 6))
_PLACES = (15, 8, 7, 6)

#: Words reordered at a time: what is kept beside them stays in a GPU's L2 cache.
_PART = 1 << 22


def to_kernel_order_(codes: Tensor, scales: Tensor) -> None:
    """Reorder u8 codes [..., N, K/2] and scales [..., N, K/16] of ModelOpt in place; K is a multiple of 16."""
    _move_bits_(codes, _steps(back=False))
    for part in (codes, scales):
        if in_blocks(codes.shape[-2], codes.shape[-1] * 2):
            _swap_(part, BLOCK_ROWS, codes.shape[-1] * 2 // BLOCK_COLUMNS)


def from_kernel_order(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """ModelOpt's order of what :func:`to_kernel_order_` has reordered: copies."""
    codes, scales = codes.clone(), scales.clone()
    for part in (codes, scales):
        if in_blocks(codes.shape[-2], codes.shape[-1] * 2):
            _swap_(part, codes.shape[-1] * 2 // BLOCK_COLUMNS, BLOCK_ROWS)
    _move_bits_(codes, _steps(back=True))
    return codes, scales


def _swap_(packed: Tensor, outer: int, inner: int) -> None:
    """Swap the axes ``outer`` and ``inner`` of each eight rows, which lie together."""
    size = packed.shape[-1] * BLOCK_ROWS // (outer * inner)
    groups = packed.view(-1, outer, inner, size)
    at_once = max(1, 4 * _PART // (outer * inner * size))
    for first in range(0, groups.shape[0], at_once):
        part = groups[first : first + at_once]
        part.view(-1, inner, outer, size).copy_(part.transpose(1, 2).clone(memory_format=torch.contiguous_format))


@cache
def _steps(back: bool) -> tuple[tuple[int, int], ...]:
    """(shift to the left, mask of the bits it brings to their places), for each distance that bits move."""
    masks: dict[int, int] = {}
    for pair, rotations in enumerate(ROTATIONS):
        for half in range(2):
            for place, rotation, bit in zip(_PLACES, rotations, (3, 2, 1, 0), strict=True):
                plain, word = 8 * pair + 4 * half + bit, (place + 16 * half - rotation) % 32
                source, target = (word, plain) if back else (plain, word)
                masks[target - source] = masks.get(target - source, 0) | 1 << target
    return tuple((shift, mask - (1 << 32) if mask >> 31 else mask) for shift, mask in sorted(masks.items()))


def _move_bits_(codes: Tensor, steps: tuple[tuple[int, int], ...]) -> None:
    whole = codes.view(-1).view(torch.int32)
    for first in range(0, whole.numel(), _PART):
        words = whole[first : first + _PART]
        moved, part = torch.zeros_like(words), torch.empty_like(words)
        for shift, mask in steps:
            if shift >= 0:
                torch.bitwise_left_shift(words, shift, out=part)
            else:  # an arithmetic shift, which repeats the sign where no mask reaches
                torch.bitwise_right_shift(words, -shift, out=part)
            moved |= part.bitwise_and_(mask)
        words.copy_(moved)
