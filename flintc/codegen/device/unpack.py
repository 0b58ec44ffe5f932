"""NVFP4 codes -> BF16 values in their own order."""

import triton
import triton.language as tl

from flintc.codegen.device.mode import INTERPRET
from flintc.codegen.device.nvfp4 import scale_values, word_values


@triton.jit
def unpack_pairs(words, scales):
    """int32 words of eight codes [N, 4] and int16 pairs of E4M3 scales [N] -> code * scale / SUM_UNIT, [N, 4, 8].

    The first scale of a pair belongs to the first two words. BF16 and exact; FP32 in the interpreter.
    """
    if INTERPRET:
        bytes = tl.join(scales, scales >> 8).to(tl.int32) & 0x7F
        scale = (bytes << 20).to(tl.float32, bitcast=True) * 2.0**113
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (scales.shape[0], 2, 2)), words.shape)
        code = words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]
        value = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
        return value * scale[:, :, None]
    else:
        low, high = scale_values(scales)
        scale = tl.broadcast_to(tl.join(low, high)[:, :, None], (scales.shape[0], 2, 2))
        c0, c4, c1, c5, c2, c6, c3, c7 = word_values(words, tl.reshape(scale, words.shape))
        # Axes from left to right are the bits of a code's number.
        evens = tl.join(tl.join(c0, c4), tl.join(c2, c6))
        odds = tl.join(tl.join(c1, c5), tl.join(c3, c7))
        return tl.reshape(tl.join(evens, odds), (scales.shape[0], 4, 8))
