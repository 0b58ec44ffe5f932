"""The order in which kernels read NVFP4 weights: a permutation of the bits of ModelOpt's.

Within a word of eight codes: a code becomes BF16 by moving its sign to bit 15 and the rest to bits 8 to 6. In the order
of ModelOpt that takes each pair of codes two shifts and two masks. Here the codes of columns 2i and 2i + 1 lie so that
one rotation of the word brings both to their places in a register's halves, and one mask takes them out; the last pair
takes two. The places that the mask 0x81c081c0 leaves free under rotations by 0, 4 and 10 are what the fourth pair has
to make do with.

Among words: blocks of 8 rows and 128 columns lie together (:func:`flintc.ir.packed.in_blocks`), since that is what a
warp loads at once: 512 bytes of codes, and 64 of scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from flintc.ir.packed import BLOCK_COLUMNS, BLOCK_ROWS, in_blocks

#: Rotation to the left, by pair, that brings a code's bits 3 (the sign), 2, 1 and 0 to bits 15, 8, 7 and 6 of a half.
ROTATIONS = ((0, 0, 0, 0), (4, 4, 4, 4), (10, 10, 10, 10), (14, 14, 14, 6))
_PLACES = (15, 8, 7, 6)

#: Words reordered at a time: enough to keep a GPU busy, few enough that what stands beside them is no matter.
_PART = 1 << 22


def to_kernel_order_(codes: Tensor, scales: Tensor) -> None:
    """Reorder u8 codes [..., N, K/2] and scales [..., N, K/16] of ModelOpt in place; K is a multiple of 16."""
    _move_bits_(codes, back=False)
    _move_rows_(codes, scales, back=False)


def from_kernel_order(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """ModelOpt's order of what :func:`to_kernel_order_` has reordered: copies."""
    codes, scales = codes.clone(), scales.clone()
    _move_rows_(codes, scales, back=True)
    _move_bits_(codes, back=True)
    return codes, scales


def _move_rows_(codes: Tensor, scales: Tensor, back: bool) -> None:
    """Put each eight rows block by block, or back, where the weight is to lie so."""
    rows, columns = codes.shape[-2], codes.shape[-1] * 2
    if in_blocks(rows, columns):
        axes = BLOCK_ROWS, columns // BLOCK_COLUMNS
        for part in (codes, scales):
            _swap_(part, *(reversed(axes) if back else axes))


def _swap_(packed: Tensor, outer: int, inner: int) -> None:
    """Swap the axes ``outer`` and ``inner`` of each eight rows, which lie together, in pieces of whole 8 bytes."""
    pieces = packed.view(-1).view(torch.int64)
    size = packed.shape[-1] * BLOCK_ROWS // (8 * outer * inner)
    groups = pieces.view(-1, outer, inner, size)
    at_once = max(1, _PART // (2 * outer * inner * size))
    for first in range(0, groups.shape[0], at_once):
        part = groups[first : first + at_once]
        part.view(-1, inner, outer, size).copy_(part.transpose(1, 2).clone(memory_format=torch.contiguous_format))


def _move_bits_(codes: Tensor, back: bool) -> None:
    """Move the bits of each word to their places, or back, by a table for each half of a word."""
    low, high = _tables(back, codes.device)
    whole = codes.view(-1).view(torch.int32)
    for first in range(0, whole.numel(), _PART):
        words = whole[first : first + _PART]
        halves = words & 0xFFFF
        moved = low.index_select(0, halves)
        torch.bitwise_right_shift(words, 16, out=halves).bitwise_and_(0xFFFF)
        torch.bitwise_or(moved, high.index_select(0, halves), out=words)


@cache
def _tables(back: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the lower and the upper half of a word become: int32 [65536] each."""
    halves = torch.arange(1 << 16, dtype=torch.int64)
    tables = [torch.zeros_like(halves), torch.zeros_like(halves)]
    for plain, word in _places():
        source, target = (word, plain) if back else (plain, word)
        tables[source // 16] |= (halves >> source % 16 & 1) << target
    low, high = ((t - (t >> 31 << 32)).to(torch.int32).to(device) for t in tables)
    return low, high


def _places() -> Iterator[tuple[int, int]]:
    """Where each bit of a word stands in ModelOpt's order, and where in the order of kernels."""
    for pair, rotations in enumerate(ROTATIONS):
        for half in range(2):
            for place, rotation, bit in zip(_PLACES, rotations, (3, 2, 1, 0), strict=True):
                yield 8 * pair + 4 * half + bit, (place + 16 * half - rotation) % 32
