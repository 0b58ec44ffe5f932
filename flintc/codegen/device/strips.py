"""Attention in tiles, wholly in registers: each warp scores a strip of 16 positions for 8 heads.

Queries are the 16-row operand of ``m16n8k16`` (8 heads, 8 rows of zeros), keys its columns: both are loaded 16 bytes a
lane and called by the names that the instruction expects, as in :mod:`gemv`. The scores then stand where the second
product wants its probabilities, in whose operand a lane holds four positions: so column n of the scores is position
4 (n % 8 / 2) + 2 (n / 8) + n % 2 of the strip. Values are loaded as 8 channels of those four positions, and packed by
pairs of positions. Only the warps' results meet in shared memory.
"""

import triton
import triton.language as tl

from flintc.codegen.device.attention import LOWEST, join_rows, pages_of_tile
from flintc.codegen.device.earlier import load_earlier
from flintc.codegen.device.heads import cache_at
from flintc.codegen.device.numerics import dot_bf16, round_bf16


@triton.jit
def query_rows(q_ptr, first, GROUP: tl.constexpr, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """The heads first to first + GROUP - 1, BF16 [WARPS, 16, HEAD]: a copy for each warp, rows of zeros after them."""
    STEPS: tl.constexpr = HEAD // 32
    step = tl.arange(0, STEPS)[:, None, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    query = tl.arange(0, 2)[None, :, None, None, None] * 8 + lane // 4
    channel = step * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    at = (first + query) * HEAD + channel + tl.arange(0, WARPS)[None, None, :, None, None] * 0
    q = tl.load(q_ptr + at, mask=query < GROUP, other=0.0)
    # Axes: step, half of the rows, warp, row of eight, lane of four, instruction, half of K, pair.
    q = tl.reshape(q, (STEPS, 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(q, (2, 1, 3, 0, 5, 6, 4, 7)), (WARPS, 16, HEAD))


@triton.jit
def key_places(begin, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """Of a tile of WARPS strips from the position ``begin`` on: positions, and where their keys are loaded from.

    Places count values from the tile's first key. Axes: step, half, warp, lane, eight channels.
    """
    step = tl.arange(0, HEAD // 32)[:, None, None, None, None]
    half = tl.arange(0, 2)[None, :, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    position = tl.arange(0, WARPS)[None, None, :, None, None] * 16 + lane // 8 * 4 + half * 2 + lane // 4 % 2
    channel = step * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    return begin + position, position * HEAD + channel


@triton.jit
def key_columns(k, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """Keys as loaded, as an operand: BF16 [WARPS, HEAD, 16]."""
    k = tl.reshape(k, (HEAD // 32, 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(k, (2, 0, 5, 6, 4, 7, 1, 3)), (WARPS, HEAD, 16))


@triton.jit
def value_places(begin, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """The same of values. Axes: half, pair, group of channels, warp, lane, eight channels."""
    half = tl.arange(0, 2)[:, None, None, None, None, None]
    pair = tl.arange(0, 2)[None, :, None, None, None, None]
    group = tl.arange(0, HEAD // 64)[None, None, :, None, None, None]
    lane = tl.arange(0, 32)[None, None, None, None, :, None]
    warp = tl.arange(0, WARPS)[None, None, None, :, None, None]
    position = warp * 16 + lane % 4 * 4 + half * 2 + pair
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
def value_columns(v, HEAD: tl.constexpr, WARPS: tl.constexpr):
    """Values as loaded, as an operand: BF16 [WARPS, 16 positions in order, HEAD columns as of :func:`channel_of`]."""
    # Axes: half, pair, group, warp, lanes of eight, lanes of four, eight channels.
    v = tl.permute(tl.reshape(v, (2, 2, HEAD // 64, WARPS, 8, 4, 8)), (3, 5, 0, 1, 2, 6, 4))
    return tl.reshape(v, (WARPS, 16, HEAD))


@triton.jit
def channel_of(column):
    """The channel in ``column`` of :func:`value_columns`: of every 64, eight lanes' first ones stand first."""
    return column // 64 * 64 + column % 8 * 8 + column // 8 % 8


@triton.jit
def heads_of(x):
    """Rows 0 to 7 of x [WARPS, 16, N], within each thread."""
    rows = tl.permute(tl.reshape(x, (x.shape[0], 2, 8, x.shape[2])), (0, 2, 3, 1))
    first, _ = tl.split(rows)
    return first


@triton.jit
def strip_positions(begin, WARPS: tl.constexpr):
    """The positions of a tile's scores, whose first is ``begin``: [WARPS, 16]."""
    column = tl.arange(0, 16)
    within = column % 8 // 2 * 4 + column // 8 * 2 + column % 2
    return begin + tl.arange(0, WARPS)[:, None] * 16 + within[None, :]


@triton.jit
def strip_scores(q, k, seen, SCALE: tl.constexpr):
    """Scores of a tile's positions, -inf of those not ``seen`` (bool [WARPS, 16]): FP32 [WARPS, 8, 16]."""
    s = heads_of(dot_bf16(q, k, tl.zeros((q.shape[0], 16, 16), tl.float32))) * SCALE
    return tl.where(seen[:, None, :], s, float("-inf"))


@triton.jit
def add_values(o, p, v):
    """o [WARPS, 16, HEAD] plus the values, in shares of bf16(p) (p [WARPS, 8, 16]); o's last eight rows stay as is."""
    WARPS: tl.constexpr = p.shape[0]
    shares = tl.permute(tl.reshape(round_bf16(p), (WARPS, 8, 2, 4, 2)), (0, 1, 3, 2, 4))
    return dot_bf16(with_zeros(tl.reshape(shares, (WARPS, 8, 16))), v, o)


@triton.jit
def with_zeros(x):
    """x [WARPS, 8, N] and eight rows of zeros, within each thread: [WARPS, 16, N]."""
    rows = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 3, 1, 2))
    return tl.reshape(rows, (x.shape[0], 16, x.shape[2]))


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
    position = strip_positions(begin, WARPS)
    seen = (position <= newest) & (position >= oldest)
    s = strip_scores(q, key_columns(k, HEAD, WARPS), seen, SCALE)
    m = tl.maximum(tl.max(s, 2), LOWEST)
    p = tl.exp(s - m[:, :, None])
    o = add_values(tl.zeros((WARPS, 16, HEAD), tl.float32), p, value_columns(v, HEAD, WARPS))
    return join_rows(heads_of(o), m, tl.sum(p, 2))


@triton.jit
def attend_strips(
    q,
    k,
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
    """The one partial of the tiles begin to end - 1, over their positions up to newest: as :func:`join_rows` gives it.

    q: of :func:`query_rows`. k: keys of the first tile, as loaded. page, page_next: the pages of the first two tiles,
    each within its own. Channels stand as of :func:`channel_of`.
    """
    TILE: tl.constexpr = WARPS * 16
    o = tl.zeros((WARPS, 16, HEAD), tl.float32)
    m = tl.full((WARPS, 8), LOWEST, tl.float32)
    l = tl.zeros((WARPS, 8, 16), tl.float32)
    keys = cache_ptr + cache_at(page.to(tl.int64), 0, kv_head, begin * TILE, KV_HEADS, PAGE, HEAD)
    for i in range(begin, end):
        v = load_strips(keys + KV_HEADS * PAGE * HEAD, value_places(i * TILE, HEAD, WARPS), 0, newest, 0.0)
        # The next tile's keys are on their way while this one's are used, and the page of the one after it.
        ahead, later = (i + 1) * TILE, (i + 2) * TILE
        keys = cache_ptr + cache_at(page_next.to(tl.int64), 0, kv_head, ahead, KV_HEADS, PAGE, HEAD)
        k_next = load_strips(keys, key_places(ahead, HEAD, WARPS), 0, tl.where(i + 1 < end, newest, -1), 0.0)
        page_next = pages_of_tile(
            block_table_ptr, seq, columns, later, newest, TILE, PAGE, RING=False, WARPS=WARPS, STRIP=16
        )
        s = strip_scores(q, key_columns(k, HEAD, WARPS), strip_positions(i * TILE, WARPS) <= newest, SCALE)
        top = tl.maximum(m, tl.max(s, 2))
        keep = tl.exp(m - top)[:, :, None]
        p = tl.exp(s - top[:, :, None])
        o = add_values(o * with_zeros(keep), p, value_columns(v, HEAD, WARPS))
        l = l * keep + p
        m = top
        k = k_next
    return join_rows(heads_of(o), m, tl.sum(l, 2))
