"""Attention of one query group over a range of positions, and the merging of such partials."""

import triton
import triton.language as tl

from flintc.codegen.device.heads import cache_at, page_of
from flintc.codegen.device.mode import INTERPRET
from flintc.codegen.device.numerics import dot_bf16, round_bf16


@triton.jit
def tile_at(
    pages,
    entry,
    tile,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Offsets of the keys of the TILE positions from ``tile`` on in the cache, int64 [TILE].

    pages: the page of each ``entry`` (a position over PAGE); positions in none of them get any page.
    """
    step = tl.arange(0, TILE)
    if PAGE % TILE == 0:
        page = tl.sum(tl.where(entry == tile // PAGE, pages, 0), 0)
        return cache_at(page, 0, kv_head, tile, KV_HEADS, PAGE, HEAD) + step * HEAD
    else:
        mine = entry[None, :] == ((tile + step) // PAGE)[:, None]
        page = tl.sum(tl.where(mine, pages[None, :], 0), 1)
        return cache_at(page, 0, kv_head, tile + step, KV_HEADS, PAGE, HEAD)


@triton.jit
def attend(
    q,
    cache_ptr,
    block_table_ptr,
    seq,
    columns,
    kv_head,
    begin,
    end,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    TILE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """One partial: q (BF16 [QUERIES, HEAD], padded to powers of two) over positions begin to end - 1, at least one.

    Returns FP32 o [QUERIES, HEAD] = sum of exp(s - m) * v, m [QUERIES] = max of s, l [QUERIES] = sum of exp(s - m).
    """
    # Looking a tile's page up inside the loop would put one load in front of the others.
    entry = begin // PAGE + tl.arange(0, PAGES)
    pages = page_of(block_table_ptr, seq, entry * PAGE, columns, entry * PAGE < end, PAGE, RING)
    channel = tl.arange(0, q.shape[1])[None, :]
    o = tl.zeros(q.shape, tl.float32)
    m = tl.full((q.shape[0],), float("-inf"), tl.float32)
    l = tl.zeros((q.shape[0],), tl.float32)
    for tile in range(begin // TILE * TILE, end, TILE):
        position = tile + tl.arange(0, TILE)
        seen = (position >= begin) & (position < end)
        # Slots outside the range may hold anything: they are not read.
        inside = seen[:, None] & (channel < HEAD)
        at = tile_at(pages, entry, tile, kv_head, KV_HEADS, HEAD, PAGE, TILE)
        key = cache_ptr + at[:, None] + channel
        k = tl.load(key, mask=inside, other=0.0)
        v = tl.load(key + KV_HEADS * PAGE * HEAD, mask=inside, other=0.0)
        s = dot_bf16(q, tl.trans(k), tl.zeros((q.shape[0], TILE), tl.float32)) * SCALE
        s = tl.where(seen[None, :], s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        keep = tl.exp(m - top)
        p = tl.exp(s - top[:, None])
        l = l * keep + tl.sum(p, 1)
        o = dot_bf16(round_bf16(p), v, o * keep[:, None])
        m = top
    return o, m, l


@triton.jit
def store_partial(o_ptr, m_ptr, l_ptr, at, inside, o, m, l, HEAD: tl.constexpr):
    """Store the partials of some heads at ``at`` (int [HEADS], index of a head's split)."""
    channel = tl.arange(0, o.shape[1])[None, :]
    tl.store(o_ptr + at[:, None] * HEAD + channel, o, mask=inside[:, None] & (channel < HEAD))
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(l_ptr + at, l, mask=inside)


@triton.jit
def merge_pair(o, m, l, o_next, m_next, l_next):
    """The partial of two ranges of positions from the partials of each; m_next -inf stands for an empty range."""
    top = tl.maximum(m, m_next)
    keep, add = tl.exp(m - top), tl.exp(m_next - top)
    return o * keep[:, None] + o_next * add[:, None], top, l * keep + l_next * add


@triton.jit
def no_partial(heads, HEAD: tl.constexpr):
    """The partials of some heads over an empty range of positions."""
    o = tl.zeros((heads.shape[0], triton.next_power_of_2(HEAD)), tl.float32)
    return o, tl.full(heads.shape, float("-inf"), tl.float32), tl.zeros(heads.shape, tl.float32)


@triton.jit
def merge_range(o_ptr, m_ptr, l_ptr, at, count, STEP: tl.constexpr, inside, HEAD: tl.constexpr, BATCH: tl.constexpr):
    """Merge the partials of some heads at ``at``, ``at + STEP``, ... (``count`` of them, at least one) in this order.

    Loads bypass the L1 cache, since another multiprocessor may have written the partials; those of BATCH partials are
    on their way together.
    """
    channel = tl.arange(0, triton.next_power_of_2(HEAD))[None, :]
    o, m, l = no_partial(at, HEAD)
    for begin in range(0, count, BATCH):
        for i in tl.static_range(BATCH):
            live = begin + i < count
            one = at + (begin + i) * STEP
            within = (inside & live)[:, None] & (channel < HEAD)
            o_next = tl.load(o_ptr + one[:, None] * HEAD + channel, mask=within, other=0.0, cache_modifier=".cg")
            m_next = tl.load(m_ptr + one, mask=inside & live, other=0.0, cache_modifier=".cg")
            l_next = tl.load(l_ptr + one, mask=inside & live, other=0.0, cache_modifier=".cg")
            m_next = tl.where(live, m_next, float("-inf"))
            o, m, l = merge_pair(o, m, l, o_next, m_next, l_next)
    return o, m, l


@triton.jit
def store_output(y_ptr, heads, inside, o, m, l, sink, HEAD: tl.constexpr):
    """Store the attention output of some heads, BF16: o over l and the sink's share of the denominator.

    Both are taken relative to the larger of m and the sink (FP32, -inf for none), so that no exponential overflows.
    """
    channel = tl.arange(0, o.shape[1])[None, :]
    top = tl.maximum(m, sink)
    scale = tl.exp(m - top)
    y = round_bf16(o * scale[:, None] / (l * scale + tl.exp(sink - top))[:, None])
    tl.store(y_ptr + heads[:, None] * HEAD + channel, y, mask=inside[:, None] & (channel < HEAD))


@triton.jit
def store_zeros(y_ptr, WIDTH: tl.constexpr):
    """Store WIDTH zeros: the attention output of a padded row."""
    at = tl.arange(0, triton.next_power_of_2(WIDTH))
    tl.store(y_ptr + at, tl.zeros(at.shape, tl.bfloat16), mask=at < WIDTH)


@triton.jit
def prefetch_tile(
    cache_ptr,
    block_table_ptr,
    seq,
    columns,
    kv_head,
    begin,
    end,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Bring keys and values of the first TILE positions from begin to end - 1, if there are any, towards L2.

    A hint: it reads nothing into the program, so slots that an earlier launch is still to write do no harm.
    """
    if not INTERPRET:
        LINE: tl.constexpr = 64  # BF16 values in 128 bytes
        position = begin + tl.arange(0, TILE)
        live = (position < end) & (seq >= 0)
        page = page_of(block_table_ptr, seq, position, columns, live, PAGE, RING)
        line = tl.arange(0, triton.next_power_of_2(triton.cdiv(HEAD, LINE)))[None, :] * LINE
        for plane in tl.static_range(2):
            at = cache_at(page, plane, kv_head, position, KV_HEADS, PAGE, HEAD)[:, None] + line
            wanted = live[:, None] & (line < HEAD)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r",
                [cache_ptr + at, wanted.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
