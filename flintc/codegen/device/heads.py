"""One attention head's channels, held as two halves so that the rotation pairs them without a shuffle.

Tiles are [ROWS, HEAD / 2] each, rows of a step by channels; ``live`` is a [ROWS, 1] mask.
"""

import triton
import triton.language as tl

from flintc.codegen.device.numerics import round_bf16


@triton.jit
def load_halves(base_ptr, at, live, HEAD: tl.constexpr):
    """Both halves of the heads whose first channels stand at ``at`` (int [ROWS, 1]), FP32; zero where not live."""
    channel = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
    inside = live & (channel < HEAD // 2)
    first = tl.load(base_ptr + at + channel, mask=inside, other=0.0)
    second = tl.load(base_ptr + at + HEAD // 2 + channel, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(base_ptr, at, live, first, second, HEAD: tl.constexpr):
    """Store the halves of the heads whose first channels stand at ``at`` (int [ROWS, 1])."""
    channel = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
    inside = live & (channel < HEAD // 2)
    tl.store(base_ptr + at + channel, first, mask=inside)
    tl.store(base_ptr + at + HEAD // 2 + channel, second, mask=inside)


@triton.jit
def load_head_vector(vector_ptr, HEAD: tl.constexpr):
    """Halves of a vector of HEAD values (a norm weight), FP32 [1, HEAD / 2]."""
    channel = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
    inside = channel < HEAD // 2
    first = tl.load(vector_ptr + channel, mask=inside, other=0.0)
    second = tl.load(vector_ptr + HEAD // 2 + channel, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def norm_halves(first, second, first_weight, second_weight, HEAD: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm over the channels of each row: FP32 halves -> BF16 halves."""
    squares = tl.sum(first * first + second * second, 1)
    scale = tl.rsqrt(squares / HEAD + EPS)[:, None]
    return round_bf16(first * scale * first_weight), round_bf16(second * scale * second_weight)


@triton.jit
def load_angles(table_ptr, positions, live, HEAD: tl.constexpr):
    """Cosines and sines of ``positions`` (int [ROWS, 1]) from the table f32[C, 2, HEAD / 2]: FP32 [ROWS, HEAD / 2]."""
    return load_halves(table_ptr, positions * HEAD, live, HEAD)


@triton.jit
def rotate_halves(first, second, cosine, sine):
    """Rotate the pairs (first, second) by their angles: FP32 or BF16 halves -> BF16 halves."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return round_bf16(a * cosine - b * sine), round_bf16(b * cosine + a * sine)


@triton.jit
def page_of(block_table_ptr, seqs, positions, columns, live, PAGE: tl.constexpr, RING: tl.constexpr):
    """Page that holds each position of each sequence, int64; ``columns`` pages per sequence, a ring if RING.

    ``live`` masks the look-up: sequences of -1 and positions past the row's own have no page.
    """
    column = positions // PAGE
    if RING:
        column = column % columns
    return tl.load(block_table_ptr + seqs * columns + column, mask=live, other=0).to(tl.int64)


@triton.jit
def cache_at(page, plane, head, positions, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD: tl.constexpr):
    """Offset of a head's first channel in the cache bf16[P, 2, KV_HEADS, PAGE, HEAD]; plane 0 keys, 1 values."""
    return (((page * 2 + plane) * KV_HEADS + head) * PAGE + positions % PAGE) * HEAD
