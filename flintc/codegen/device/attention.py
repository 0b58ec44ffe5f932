"""Attention of one query group over a range of positions, and the merging of such partials."""

import triton
import triton.language as tl

from flintc.codegen.device.heads import cache_at, page_of
from flintc.codegen.device.hints import send_for
from flintc.codegen.device.numerics import dot_bf16, round_bf16
from flintc.codegen.device.sums import add_all

#: The lowest finite FP32 number.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def tile_positions(tile, WARPS: tl.constexpr, STRIP: tl.constexpr):
    """The positions of a tile, each warp's own STRIP in a row of its own, [WARPS, STRIP]."""
    return tile + tl.arange(0, WARPS)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]


@triton.jit
def pages_of_tile(
    block_table_ptr,
    seq,
    columns,
    tile,
    newest,
    CHUNK: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    WARPS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """The pages of a tile's positions, int32: one number where no page ends inside a tile, else [WARPS, STRIP].

    Positions past ``newest`` are not looked up, since the sequence may have no page for them.
    """
    position = tile
    if PAGE % (WARPS * STRIP) != 0 or CHUNK % (WARPS * STRIP) != 0:
        position = tile_positions(tile, WARPS, STRIP)
    return page_of(block_table_ptr, seq, position, columns, (position <= newest) & (seq >= 0), PAGE, RING).to(tl.int32)


@triton.jit
def keys_at(
    cache_ptr,
    pages,
    tile,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    WARPS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Pointers to the keys of a tile, [WARPS, STRIP, channels]; ``pages`` as of :func:`pages_of_tile`."""
    CHANNELS: tl.constexpr = triton.next_power_of_2(HEAD)
    if pages.numel == 1 and HEAD % 8 == 0:
        first = cache_ptr + cache_at(pages, 0, kv_head, tile, KV_HEADS, PAGE, HEAD)
        # A thread's part of the address first and the steps from there after: the steps become parts of instructions.
        eight = tl.arange(0, 8)[None, None, :, None] * HEAD + tl.arange(0, CHANNELS)[None, None, None, :]
        warp, eights = tl.arange(0, WARPS)[:, None, None, None], tl.arange(0, STRIP // 8)[None, :, None, None]
        keys = tl.reshape(first + eight + (warp * STRIP + eights * 8) * HEAD, (WARPS, STRIP, CHANNELS))
        # The compiler does not see through the reshape that eight channels are 16 aligned bytes.
        return tl.max_contiguous(tl.multiple_of(keys, (1, 1, 16)), (1, 1, 8))
    else:
        at = cache_at(pages, 0, kv_head, tile_positions(tile, WARPS, STRIP), KV_HEADS, PAGE, HEAD)
        return cache_ptr + at[:, :, None] + tl.arange(0, CHANNELS)[None, None, :]


@triton.jit
def load_queries(q_ptr, first, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """The heads first to first + GROUP - 1, BF16 [WARPS, channels, QUERIES]: a copy for each warp, padded with zeros.

    Each lane loads the pairs of channels that the matrix instruction wants of it: lane 4g + t wants query g of every
    eight, and channels 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16. So they pass through no shared memory.
    """
    CHANNELS: tl.constexpr = triton.next_power_of_2(HEAD)
    eights = tl.arange(0, QUERIES // 8)[:, None, None, None, None, None]
    halves = tl.arange(0, CHANNELS // 8)[None, :, None, None, None, None]
    lane = tl.arange(0, 8)[None, None, None, :, None, None]
    pair = tl.arange(0, 4)[None, None, None, None, :, None]
    query = eights * 8 + lane
    channel = halves * 8 + pair * 2 + tl.arange(0, 2)[None, None, None, None, None, :]
    at = (first + query) * HEAD + channel + tl.arange(0, WARPS)[None, None, :, None, None, None] * 0
    q = tl.load(q_ptr + at, mask=(query < GROUP) & (channel < HEAD), other=0.0)
    return tl.reshape(tl.permute(q, (2, 1, 4, 5, 0, 3)), (WARPS, CHANNELS, QUERIES))


@triton.jit
def load_tile(key, seen, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr):
    """Keys [WARPS, STRIP, channels] at ``key``, and values [WARPS, channels, STRIP], of the positions ``seen``.

    seen: bool [WARPS, STRIP]. Slots of other positions may hold anything: they are not read, and give zeros.
    """
    channel = tl.arange(0, triton.next_power_of_2(HEAD))[None, :]
    value = tl.permute(key + KV_HEADS * PAGE * HEAD, (0, 2, 1))
    if HEAD % 8 == 0:
        value = tl.max_contiguous(tl.multiple_of(value, (1, 16, 1)), (1, 8, 1))
    k = tl.load(key, mask=seen[:, :, None] & (channel < HEAD)[:, None, :], other=0.0)
    v = tl.load(value, mask=seen[:, None, :] & (channel < HEAD)[:, :, None], other=0.0)
    return k, v


@triton.jit
def tile_scores(q, k, seen, SCALE: tl.constexpr):
    """Scores of a tile's positions, -inf of those not ``seen`` (bool [WARPS, STRIP]): FP32 [WARPS, STRIP, QUERIES]."""
    s = dot_bf16(k, q, tl.zeros((k.shape[0], k.shape[1], q.shape[2]), tl.float32)) * SCALE
    return tl.where(seen[:, :, None], s, float("-inf"))


@triton.jit
def see_tile(o, m, l, q, k, v, seen, SCALE: tl.constexpr):
    """Each warp's part of a partial, its strip of a tile added; shapes as of :func:`nothing_seen`."""
    s = tile_scores(q, k, seen, SCALE)
    top = tl.maximum(m, tl.max(s, 1))
    keep = tl.exp(m - top)[:, None, :]
    p = tl.exp(s - top[:, None, :])
    return dot_bf16(v, round_bf16(p), o * keep), top, l * keep + p


@triton.jit
def attend(
    q,
    cache_ptr,
    block_table_ptr,
    seq,
    columns,
    kv_head,
    oldest,
    newest,
    begin,
    end,
    page,
    page_next,
    o_ptr,
    m_ptr,
    l_ptr,
    at,
    inside,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """The partials of the chunks that tiles begin to end - 1 make up, over their positions from oldest to newest.

    q: BF16 [WARPS, channels, QUERIES]. page, page_next: the pages of the first two tiles. The partial of chunk c is
    stored at ``at + c`` (at: int [QUERIES]) of the heads ``inside``: m the maximum of the scores s, l = sum of
    exp(s - m), o = sum of exp(s - m) * v.
    """
    TILE: tl.constexpr = WARPS * STRIP
    CHANNELS: tl.constexpr = triton.next_power_of_2(HEAD)
    o, m, l = nothing_seen(WARPS, STRIP, CHANNELS, q.shape[2])
    page = page.to(tl.int64)
    for i in range(begin, end):
        chunk, tile = i // tiles_of(CHUNK, TILE), tile_begin(i, CHUNK, TILE)
        key = keys_at(cache_ptr, page, tile, kv_head, KV_HEADS, HEAD, PAGE, WARPS, STRIP)
        position = tile_positions(tile, WARPS, STRIP)
        seen = position <= newest
        if RING:
            seen = seen & (position >= oldest)
        if CHUNK % TILE != 0:
            seen = seen & (position < (chunk + 1) * CHUNK)
        k, v = load_tile(key, seen, KV_HEADS, HEAD, PAGE)
        # Looked up two tiles ahead, or the tile's loads would wait for it. (Were the page handed on as it is, rather
        # than made int64, the compiler would overlap nothing in this loop.)
        page = page_next.to(tl.int64)
        page_next = pages_of_tile(
            block_table_ptr, seq, columns, tile_begin(i + 2, CHUNK, TILE), newest, CHUNK, PAGE, RING, WARPS, STRIP
        )
        o, m, l = see_tile(o, m, l, q, k, v, seen, SCALE)
        if ((i + 1) % tiles_of(CHUNK, TILE) == 0) | (i + 1 == end):
            o_chunk, m_chunk, l_chunk = join_warps(o, m, l)
            channel = tl.arange(0, CHANNELS)
            store_partial(o_ptr, m_ptr, l_ptr, at + chunk, inside, o_chunk, m_chunk, l_chunk, channel, HEAD)
            o, m, l = nothing_seen(WARPS, STRIP, CHANNELS, q.shape[2])


@triton.jit
def attend_run(
    q,
    cache_ptr,
    block_table_ptr,
    seq,
    columns,
    kv_head,
    oldest,
    newest,
    begin,
    end,
    page,
    page_next,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    STRIP: tl.constexpr,
):
    """The one partial of the tiles begin to end - 1, over positions from oldest to newest: see :func:`join_warps`.

    q, page and page_next as for :func:`attend`; tiles are counted from position 0 on, and oldest begins a chunk.
    """
    TILE: tl.constexpr = WARPS * STRIP
    o, m, l = nothing_seen(WARPS, STRIP, triton.next_power_of_2(HEAD), q.shape[2])
    page = page.to(tl.int64)
    for i in range(begin, end):
        key = keys_at(cache_ptr, page, i * TILE, kv_head, KV_HEADS, HEAD, PAGE, WARPS, STRIP)
        position = tile_positions(i * TILE, WARPS, STRIP)
        seen = position <= newest
        if CHUNK % TILE != 0:
            seen = seen & (position >= oldest)
        k, v = load_tile(key, seen, KV_HEADS, HEAD, PAGE)
        # Two tiles ahead, and int64 only here: as in `attend`.
        page = page_next.to(tl.int64)
        page_next = pages_of_tile(
            block_table_ptr, seq, columns, (i + 2) * TILE, newest, TILE, PAGE, RING=False, WARPS=WARPS, STRIP=STRIP
        )
        o, m, l = see_tile(o, m, l, q, k, v, seen, SCALE)
    return join_warps(o, m, l)


@triton.jit
def nothing_seen(WARPS: tl.constexpr, STRIP: tl.constexpr, CHANNELS: tl.constexpr, QUERIES: tl.constexpr):
    """Each warp's part of a partial over no position: o [WARPS, CHANNELS, QUERIES], m, l [WARPS, STRIP, QUERIES].

    m is finite, since a warp may see none of a chunk's positions; l is summed over the strip at the end.
    """
    o = tl.zeros((WARPS, CHANNELS, QUERIES), tl.float32)
    return o, tl.full((WARPS, QUERIES), LOWEST, tl.float32), tl.zeros((WARPS, STRIP, QUERIES), tl.float32)


@triton.jit
def join_warps(o, m, l):
    """The partial of a chunk from those of the warps: o [QUERIES, CHANNELS], m and l [QUERIES]."""
    o, l = tl.permute(o, (0, 2, 1)), tl.sum(l, 1)
    top = tl.max(m, 0)
    keep = tl.exp(m - top[None, :])
    shares = add_all(tl.permute(o * keep[:, :, None], (1, 2, 0)))
    return tl.reshape(shares, (o.shape[1], o.shape[2])), top, tl.sum(l * keep, 0)


@triton.jit
def tiles_of(CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Tiles of a chunk: it is cut from its first position on."""
    return (CHUNK + TILE - 1) // TILE


@triton.jit
def tile_of(position, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Number of the tile that holds a position."""
    return position // CHUNK * tiles_of(CHUNK, TILE) + position % CHUNK // TILE


@triton.jit
def tile_begin(i, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """First position of tile number ``i``."""
    return i // tiles_of(CHUNK, TILE) * CHUNK + i % tiles_of(CHUNK, TILE) * TILE


@triton.jit
def run_begin(program, count, active):
    """First part of a program's run, where ``active`` programs share ``count`` parts as evenly as they can."""
    return program * count // tl.maximum(active, 1)


@triton.jit
def store_partial(o_ptr, m_ptr, l_ptr, at, inside, o, m, l, channel, HEAD: tl.constexpr):
    """Store the partials of some heads at ``at`` (int [HEADS], index of a head's split); channel: of o's columns."""
    channel = channel[None, :]
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
def merge_segment(o_ptr, m_ptr, l_ptr, at, count, inside, HEAD: tl.constexpr, SEGMENT: tl.constexpr):
    """Merge the partials of some heads at ``at``, ``at + 1``, ... (``count`` of them, 1 to SEGMENT) in this order.

    Loads bypass the L1 cache, since another multiprocessor may have written the partials. All are on their way
    together: only the maximum stands between the partials and their sum.
    """
    channel = tl.arange(0, triton.next_power_of_2(HEAD))[None, :]
    member = tl.arange(0, triton.next_power_of_2(SEGMENT))[None, :]
    live = inside[:, None] & (member < count)
    m = tl.max(tl.load(m_ptr + at[:, None] + member, mask=live, other=float("-inf"), cache_modifier=".cg"), 1)
    m = tl.where(inside, m, 0.0)
    o, _, l = no_partial(at, HEAD)
    for i in tl.static_range(SEGMENT):
        live = inside & (i < count)
        within = live[:, None] & (channel < HEAD)
        o_next = tl.load(o_ptr + (at + i)[:, None] * HEAD + channel, mask=within, other=0.0, cache_modifier=".cg")
        m_next = tl.load(m_ptr + at + i, mask=live, other=float("-inf"), cache_modifier=".cg")
        l_next = tl.load(l_ptr + at + i, mask=live, other=0.0, cache_modifier=".cg")
        share = tl.exp(m_next - m)
        o += o_next * share[:, None]
        l += l_next * share
    return o, m, l


@triton.jit
def merge_segments(o_ptr, m_ptr, l_ptr, at, count, inside, HEAD: tl.constexpr, SEGMENT: tl.constexpr):
    """As :func:`merge_segment`, but for any ``count`` of partials: those of SEGMENT at a time, one after the other."""
    o, m, l = no_partial(at, HEAD)
    for begin in range(0, count, SEGMENT):
        members = tl.minimum(count - begin, SEGMENT)
        o_next, m_next, l_next = merge_segment(o_ptr, m_ptr, l_ptr, at + begin, members, inside, HEAD, SEGMENT)
        o, m, l = merge_pair(o, m, l, o_next, m_next, l_next)
    return o, m, l


@triton.jit
def merge_channels(o_ptr, m_ptr, l_ptr, at, count, channel, sink, HEAD: tl.constexpr, MOST: tl.constexpr):
    """The attention output of one head in some channels, FP32, from its partials at ``at``, ``at + 1``, ...

    There are ``count`` of them, at most MOST. The order is that of the sum over an axis of MOST, whatever ``count`` is.
    sink: FP32, -inf for none. All loads are on their way together; they bypass the L1 cache, since other
    multiprocessors have written the partials.
    """
    member = tl.arange(0, triton.next_power_of_2(MOST))
    live = member < count
    within = live[:, None] & (channel < HEAD)[None, :]
    m = tl.load(m_ptr + at + member, mask=live, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(l_ptr + at + member, mask=live, other=0.0, cache_modifier=".cg")
    # The head's part of the address first: the steps from there become parts of the instructions.
    place = member[:, None] * HEAD + channel[None, :]
    o = tl.load(o_ptr + at * HEAD + place, mask=within, other=0.0, cache_modifier=".cg")
    top = tl.maximum(tl.maximum(tl.max(m, 0), sink), LOWEST)
    share = tl.exp(m - top)
    return tl.sum(o * share[:, None], 0) / (tl.sum(l * share, 0) + tl.exp(sink - top))


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
    """Bring keys and values of the first TILE positions from begin to end - 1, if there are any, towards L2."""
    LINE: tl.constexpr = 64  # BF16 values in 128 bytes
    position = begin + tl.arange(0, TILE)
    live = (position < end) & (seq >= 0)
    page = page_of(block_table_ptr, seq, position, columns, live, PAGE, RING)
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(HEAD, LINE)))[None, :] * LINE
    for plane in tl.static_range(2):
        at = cache_at(page, plane, kv_head, position, KV_HEADS, PAGE, HEAD)[:, None] + line
        send_for(cache_ptr + at, live[:, None] & (line < HEAD))
