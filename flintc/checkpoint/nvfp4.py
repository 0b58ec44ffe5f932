"""NVFP4 between ggml's blocks and ModelOpt's layout: the same numbers, arranged differently.

A ggml block is 36 bytes for 64 values: four scale bytes, then four groups of 8 bytes; byte j of group g holds value
16g + j in its low nibble and 16g + 8 + j in its high nibble. In ModelOpt's layout (class Nvfp4 of the reference) byte i
of a row holds values 2i (low) and 2i + 1 (high), and the scales are a matrix of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bytes of a ggml block.
BLOCK_BYTES = 36
_GROUPS = 4

#: Scale bytes as ggml reads them: the sign bit is masked, and the bits of NaN mean zero.
_SIGN, _MAGNITUDE, _ZERO, _NAN = 0x80, 0x7F, 0x7F, 0xFF


class ScaleError(ValueError):
    """A block scale that is no number, or none that a ggml block can hold."""


def from_ggml(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes u8 [..., K/2] and E4M3 scales u8 [..., K/16] of rows of ggml blocks, u8 [..., K/64 * 36].

    Codes are kept bit for bit. Scales come out in canonical form, 0x00 to 0x7E: 0x7F becomes zero and the sign bit is
    dropped. Runs where ``blocks`` lives. ScaleError where a scale byte is 0xFF.
    """
    blocks = _split(blocks, BLOCK_BYTES)
    groups = _split(blocks[..., _GROUPS:], 8)
    even, odd = groups[..., 0::2], groups[..., 1::2]
    first, second = (even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)
    codes = torch.cat((first, second), dim=-1).flatten(-3)
    return codes, _canonical(blocks[..., :_GROUPS]).flatten(-2)


def to_ggml(codes: Tensor, scales: Tensor) -> Tensor:
    """Rows of ggml blocks, u8 [..., K/64 * 36], from codes u8 [..., K/2] and E4M3 scales u8 [..., K/16].

    K must be a multiple of 64. ScaleError where a scale is negative or NaN; minus zero becomes zero.
    """
    if bool(((scales > _SIGN) | (scales == _ZERO)).any()):
        raise ScaleError("a block scale is negative or not a number")
    halves = _split(codes, _GROUPS, 2, 4)
    first, second = halves[..., 0, :], halves[..., 1, :]
    even, odd = (first & 0x0F) | (second << 4), (first >> 4) | (second & 0xF0)
    groups = torch.stack((even, odd), dim=-1).flatten(-3)
    heads = _split(scales & _MAGNITUDE, _GROUPS)
    return torch.cat((heads, groups), dim=-1).flatten(-2)


def _split(x: Tensor, *tail: int) -> Tensor:
    """The last axis cut into [..., -1, *tail]."""
    return x.reshape(*x.shape[:-1], -1, *tail)


def _canonical(scales: Tensor) -> Tensor:
    if bool((scales == _NAN).any()):
        raise ScaleError("a block scale is 0xFF, not a number")
    masked = scales & _MAGNITUDE
    return masked.masked_fill_(masked == _ZERO, 0)
