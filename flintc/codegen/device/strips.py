"""Attention in tiles, wholly in registers: each warp scores a strip of 16 positions for 8 heads.

Positions are the 16-row operand of ``m16n8k16``, heads its 8 columns, and again the columns of the second product,
whose rows are channels: a group of eight heads fills them, and no lane holds what nobody needs. Keys, queries and
values are loaded 16 bytes a lane and called by the names that the instruction expects, as in :mod:`gemv`; values are
loaded as 8 channels of the four positions that the instruction wants of a lane, and packed by pairs of positions.
Probabilities change lanes within their warp on the way from one product to the other. Only the warps' results meet in
shared memory.
"""

import triton
import triton.language as tl

from flintc.codegen.device.attention import (
    LOWEST,
    join_warps,
    nothing_seen,
    pages_of_tile,
    see_tile,
    tile_positions,
    tile_scores,
)
from flintc.codegen.device.earlier import load_earlier
from flintc.codegen.device.heads import cache_at
from flintc.codegen.device.numerics import dot_bf16, round_bf16


@triton.jit
def query_columns(q_ptr, first, GROUP: tl.constexpr, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """The heads first to first + GROUP - 1 and zeros after them, BF16 [WARPS, HEAD, 8]: a copy for each warp."""
    STEPS: tl.constexpr = HEAD // 32
    step = tl.arange(0, STEPS)[:, None, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    query = lane // 4
    channel = step * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, :]
    at = (first + query) * HEAD + channel + tl.arange(0, WARPS)[None, :, None, None] * 0
    q = tl.load(q_ptr + at, mask=query < GROUP, other=0.0)
    # Axes: step, warp, head, lane of four, instruction, half of K, pair.
    q = tl.reshape(q, (STEPS, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(q, (1, 0, 4, 5, 3, 6, 2)), (WARPS, HEAD, 8))


@triton.jit
def key_places(begin, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """Of a tile of WARPS strips from the position ``begin`` on: positions, and where their keys are loaded from.

    Places count values from the tile's first key. Axes: step, half, warp, lane, eight channels.
    """
    step = tl.arange(0, HEAD // 32)[:, None, None, None, None]
    half = tl.arange(0, 2)[None, :, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    position = tl.arange(0, WARPS)[None, None, :, None, None] * 16 + half * 8 + lane // 4
    channel = step * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    return begin + position, position * HEAD + channel


@triton.jit
def key_rows(k, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """Keys as loaded, as an operand: BF16 [WARPS, 16 positions, HEAD]."""
    # Axes: step, half of the rows, warp, row of eight, lane of four, instruction, half of K, pair.
    k = tl.reshape(k, (HEAD // 32, 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(k, (2, 1, 3, 0, 5, 6, 4, 7)), (WARPS, 16, HEAD))


@triton.jit
def value_places(begin, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """The same of values. Axes: half, pair, group of channels, warp, lane, eight channels."""
    half = tl.arange(0, 2)[:, None, None, None, None, None]
    pair = tl.arange(0, 2)[None, :, None, None, None, None]
    group = tl.arange(0, HEAD // 64)[None, None, :, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, None, :, None]
    warp = tl.arange(0, WARPS)[None, None, None, :, None, None]
    position = warp * 16 + half * 8 + lane % 4 * 2 + pair
    channel = group * 64 + lane // 4 * 8 + tl.arange(0, 8)[None, None, None, None, None, :]
    return begin + position, position * HEAD + channel


@triton.jit
def load_strips(tile_ptr, places, oldest, newest, others):
    """Keys or values of a tile, BF16, as of :func:`key_places` or :func:`value_places`.

    tile_ptr: the tile's first one. others: what stands for positions outside oldest to newest.
    """
    position, place = places
    return tl.load(tile_ptr + place, mask=(position <= newest) & (position >= oldest), other=others)


@triton.jit
def load_earlier_strips(tile_ptr, places, oldest, newest, first):
    """The same of positions before ``first``, zeros for others: see :func:`load_earlier`."""
    position, place = places
    return load_earlier(tile_ptr + place, position, (position <= newest) & (position >= oldest), first)


@triton.jit
def value_rows(v, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """Values as loaded, as an operand: BF16 [WARPS, HEAD rows as of :func:`channel_of`, 16 positions]."""
    # Axes: half of K, pair, group, warp, row of eight, lane of four, instruction, half of the rows.
    v = tl.reshape(v, (2, 2, HEAD // 64, WARPS, 8, 4, 4, 2))
    return tl.reshape(tl.permute(v, (3, 2, 6, 7, 4, 0, 5, 1)), (WARPS, HEAD, 16))


@triton.jit
def channel_of(row):
    """The channel in ``row`` of :func:`value_rows`: of every 64, eight lanes' first ones stand first."""
    return row // 64 * 64 + row % 8 * 8 + row // 8 % 8


@triton.jit
def attend_chunk(
    q,
    k,
    v,
    oldest,
    newest,
    begin,
    SCALE: tl.constexpr,
    HEAD: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The partial of a chunk that is one tile, from the position ``begin`` on, as :func:`attend_strips` gives it.

    k, v: as loaded.
    """
    position = tile_positions(begin, WARPS, 16)
    seen = (position <= newest) & (position >= oldest)
    s = tile_scores(q, key_rows(k, HEAD, WARPS), seen, SCALE)
    m = tl.maximum(tl.max(s, 1), LOWEST)
    p = tl.exp(s - m[:, None, :])
    o = dot_bf16(value_rows(v, HEAD, WARPS), round_bf16(p), tl.zeros((WARPS, HEAD, 8), tl.float32))
    return join_warps(o, m, p)


@triton.jit
def attend_strips(
    q,
    k,
    v,
    cache_ptr,
    block_table_ptr,
    seq,
    columns,
    kv_head,
    newest,
    begin,
    end,
    page,
    page_next,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The one partial of the tiles begin to end - 1, over their positions up to newest: as :func:`join_warps` gives it.

    q: of :func:`query_columns`. k, v: keys and values of the first tile, as loaded; v None: each tile's values are
    loaded when its turn comes. page, page_next: the pages of the first two tiles, each within its own. Channels stand
    as of :func:`channel_of`.
    """
    TILE: tl.constexpr = WARPS * 16
    PLANE: tl.constexpr = KV_HEADS * PAGE * HEAD
    o, m, l = nothing_seen(WARPS, 16, HEAD, 8)
    keys = cache_ptr + cache_at(page.to(tl.int64), 0, kv_head, begin * TILE, KV_HEADS, PAGE, HEAD)
    for i in range(begin, end):
        values = load_strips(keys + PLANE, value_places(i * TILE, HEAD, WARPS), 0, newest, 0.0) if v is None else v
        # The next tile's are on their way while this one's are used, and the page of the one after it.
        ahead, later = (i + 1) * TILE, (i + 2) * TILE
        last = tl.where(i + 1 < end, newest, -1)
        keys = cache_ptr + cache_at(page_next.to(tl.int64), 0, kv_head, ahead, KV_HEADS, PAGE, HEAD)
        k_next = load_strips(keys, key_places(ahead, HEAD, WARPS), 0, last, 0.0)
        if v is not None:
            v = load_strips(keys + PLANE, value_places(ahead, HEAD, WARPS), 0, last, 0.0)
        page_next = pages_of_tile(
            block_table_ptr, seq, columns, later, newest, TILE, PAGE, RING=False, WARPS=WARPS, STRIP=16
        )
        seen = tile_positions(i * TILE, WARPS, 16) <= newest
        o, m, l = see_tile(o, m, l, q, key_rows(k, HEAD, WARPS), value_rows(values, HEAD, WARPS), seen, SCALE)
        k = k_next
    return join_warps(o, m, l)
