"""qkv [B, 5120] = x [B, 2048] times weight; heads are normed, rotated and stored.

Ops:
  linear: FP32 accumulate, tensor scale on the accumulator, then `out`
  head_norm: bf16(x * rsqrt(mean(x^2) + eps) * w)
  head_norm: bf16(x * rsqrt(mean(x^2) + eps) * w)
  rope: rotation in FP32, one rounding
  kv_write: none (a copy)

Bound: N=5120, K=2048, TILE=16, SPLIT=4, CHAINS=2, STEPS=8, EVEN=True, HEAD=128, PARTS=8, Q_FIRST=0, Q_HEADS=32,
  K_FIRST=32, V_FIRST=36, KV_HEADS=4, PAGE=64, Q_EPS=1e-06, K_EPS=1e-06, COLUMNS=9
"""

import triton
import triton.language as tl


INTERPRET: tl.constexpr = tl.constexpr(False)


UNITS: tl.constexpr = tl.constexpr(1 << 40)


WHOLE: tl.constexpr = tl.constexpr(3 << 51)


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a @ b for BF16 a and b (two- or three-dimensional), FP32 accumulate."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def load_slices(
    x_ptr,
    width,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    STRIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Each warp's BF16 vector as the operand of all its sums: [CHAINS * SPLIT, STEPS * UNITS * 32 / CHAINS, 8].

    x_ptr: where the warps' parts begin, [SPLIT]. width: columns from there on that are the vector's, zeros follow; of
    WHOLE ones, zero or all. STRIDE: columns from one step of a warp to its next. UNITS of a step: 1 beside BF16
    weights, 4 beside NVFP4 ones.
    """
    SPLIT: tl.constexpr = x_ptr.shape[0]
    EACH: tl.constexpr = STEPS * UNITS // CHAINS
    each = tl.arange(0, EACH)[:, None, None, None, None]
    of_slice = tl.arange(0, 8)[None, None, :, None, None] % CHAINS
    unit = each * CHAINS + of_slice if UNITS == 1 else of_slice * EACH + each
    lane = tl.arange(0, 4)[None, None, None, :, None]
    column = unit // UNITS * STRIDE + lane * UNITS * 8 + unit % UNITS * 8
    column += tl.arange(0, 8)[None, None, None, None, :]
    width = width[None, :, None, None, None]
    x = tl.load(x_ptr[None, :, None, None, None] + column, mask=width > (0 if WHOLE else column), other=0.0)
    # Axes: unit, split, slice, lane of four, then eight columns as the instructions take them.
    x = tl.reshape(x, (EACH, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (1, 0, 4, 5, 3, 6, 2)) if UNITS == 1 else tl.permute(x, (1, 0, 5, 3, 4, 6, 2))
    x = tl.reshape(x, (1, SPLIT, EACH * 32, 8))
    return tl.reshape(tl.broadcast_to(x, (CHAINS, SPLIT, EACH * 32, 8)), (CHAINS * SPLIT, EACH * 32, 8))


@triton.jit
def load_shared_slices(
    x_ptr,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The same of one vector [K] at ``x_ptr`` from column ``k`` on, whose steps the SPLIT warps take in turn."""
    begin = k + tl.arange(0, SPLIT) * UNITS * 32
    return load_slices(x_ptr + begin, K - begin, CHAINS, STEPS, UNITS, SPLIT * UNITS * 32, EVEN)


@triton.jit
def load_vectors(
    x_ptr,
    count,
    k,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Part of the BF16 vectors [``count``, K] at ``x_ptr``, from column ``k`` of K on, as the other operand.

    It is [CHAINS * SPLIT, STEPS * 32 / CHAINS, 8]: a vector in each column, zeros in those left.
    """
    step = tl.arange(0, STEPS)[:, None, None, None]
    split = tl.arange(0, SPLIT)[None, :, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    vector = lane // 4
    column = k + (step * SPLIT + split) * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, :]
    live = vector < count
    if not EVEN:
        live = live & (column < K)
    x = tl.load(x_ptr + vector * K + column, mask=live, other=0.0)
    # Axes: steps of a chain, chain, split, vector, lane of four, instruction, half of K, pair.
    x = tl.reshape(x, (STEPS // CHAINS, CHAINS, SPLIT, 8, 4, 2, 2, 2))
    x = tl.permute(x, (1, 2, 0, 5, 6, 4, 7, 3))
    return tl.reshape(x, (CHAINS * SPLIT, STEPS * 32 // CHAINS, 8))


@triton.jit
def load_weights(
    rows_ptr, groups, rows, k, K: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr
):
    """Tile of the BF16 matrix [``rows``, K] at ``rows_ptr``, from column ``k`` on; zero outside unless EVEN."""
    step = tl.arange(0, STEPS)[:, None, None, None, None]
    group = groups[None, :, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, :, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    row = group + lane // 4
    column = k + (step * SPLIT + split) * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    if EVEN:
        return tl.load(rows_ptr + row * K + column)
    else:
        return tl.load(rows_ptr + row * K + column, mask=(row < rows) & (column < K), other=0.0)


@triton.jit
def weight_operand(tile, CHAINS: tl.constexpr):
    """A tile as loaded -> the operand [CHAINS * SPLIT, ROWS, STEPS * 32 / CHAINS]."""
    STEPS: tl.constexpr = tile.shape[0]
    GROUPS: tl.constexpr = tile.shape[1]
    SPLIT: tl.constexpr = tile.shape[2]
    # Axes: steps of a chain, chain, group, split, row of eight, lane of four, instruction, half of K, pair.
    tile = tl.reshape(tile, (STEPS // CHAINS, CHAINS, GROUPS, SPLIT, 8, 4, 2, 2, 2))
    tile = tl.permute(tile, (1, 3, 2, 4, 0, 6, 7, 5, 8))
    return tl.reshape(tile, (CHAINS * SPLIT, GROUPS * 8, STEPS * 32 // CHAINS))


@triton.jit
def accumulate(
    acc,
    tile,
    rows_ptr,
    groups,
    rows,
    x_ptr,
    count,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """acc + weight rows x vectors over all of K: FP32 [CHAINS * SPLIT, ROWS, 8], its first axis not yet summed.

    ``tile`` is the first tile of the rows, loaded by the caller; each further one is loaded a tile ahead.
    count: of vectors; None is one whose slices are the columns, see :mod:`slices`.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    for k in tl.static_range(0, K, SPLIT * STEPS * 32):
        if count is None:
            x = load_shared_slices(x_ptr, k, K, SPLIT, CHAINS, STEPS, 1, EVEN)
        else:
            x = load_vectors(x_ptr, count, k, K, SPLIT, CHAINS, STEPS, EVEN)
        weights = weight_operand(tile, CHAINS)
        ahead = k + SPLIT * STEPS * 32
        if ahead < K:
            tile = load_weights(rows_ptr, groups, rows, ahead, K, SPLIT, STEPS, EVEN)
        acc = dot_bf16(weights, x, acc)
    return acc


@triton.jit
def arrive_last(counter_ptr, group):
    """True in exactly one of ``group`` programs: the last to get here. It then sees all stores before their calls.

    The last program puts the counter back to zero, so that a replay of the launch needs no reset.
    """
    # Every thread's stores must precede the one atomic that publishes them.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == group - 1
    if last:
        tl.store(counter_ptr, 0)
    # The last program's other threads may load only after the acquire.
    tl.debug_barrier()
    return last


@triton.jit
def cache_at(page, plane, head, positions, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD: tl.constexpr):
    """Offset of a head's first channel in the cache bf16[P, 2, KV_HEADS, PAGE, HEAD]; plane 0 keys, 1 values."""
    return (((page * 2 + plane) * KV_HEADS + head) * PAGE + positions % PAGE) * HEAD


@triton.jit
def load_halves(base_ptr, at, live, HEAD: tl.constexpr):
    """Both halves of the heads whose first channels stand at ``at`` (int [ROWS, 1]), FP32; zero where not live."""
    channel = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
    inside = live & (channel < HEAD // 2)
    first = tl.load(base_ptr + at + channel, mask=inside, other=0.0)
    second = tl.load(base_ptr + at + HEAD // 2 + channel, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def load_angles(table_ptr, positions, live, HEAD: tl.constexpr):
    """Cosines and sines of ``positions`` (int [ROWS, 1]) from the table f32[C, 2, HEAD / 2]: FP32 [ROWS, HEAD / 2]."""
    return load_halves(table_ptr, positions * HEAD, live, HEAD)


@triton.jit
def load_head_vector(vector_ptr, HEAD: tl.constexpr):
    """Halves of a vector of HEAD values (a norm weight), FP32 [1, HEAD / 2]."""
    channel = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
    inside = channel < HEAD // 2
    first = tl.load(vector_ptr + channel, mask=inside, other=0.0)
    second = tl.load(vector_ptr + HEAD // 2 + channel, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def round_bf16(x):
    """FP32 -> BF16, to nearest, ties to even."""
    if INTERPRET:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Adding the rounding bias would carry a NaN's payload into the exponent of infinity.
        quiet = (bits >> 16) | 0x40
        half = tl.where(x == x, rounded, quiet)
        return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def norm_halves(first, second, first_weight, second_weight, HEAD: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm over the channels of each row: FP32 halves -> BF16 halves."""
    squares = tl.sum(first * first + second * second, 1)
    scale = tl.rsqrt(squares / HEAD + EPS)[:, None]
    return round_bf16(first * scale * first_weight), round_bf16(second * scale * second_weight)


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
def release_dependents():
    """Let the next launch start. Publishes nothing: the next launch's wait does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rotate_halves(first, second, cosine, sine):
    """Rotate the pairs (first, second) by their angles: FP32 or BF16 halves -> BF16 halves."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return round_bf16(a * cosine - b * sine), round_bf16(b * cosine + a * sine)


@triton.jit
def row_groups(TILE: tl.constexpr):
    """First row of each group of eight of a tile: consecutive rows."""
    return tl.arange(0, TILE // 8) * 8


@triton.jit
def store_halves(base_ptr, at, live, first, second, HEAD: tl.constexpr):
    """Store the halves of the heads whose first channels stand at ``at`` (int [ROWS, 1])."""
    channel = tl.arange(0, triton.next_power_of_2(HEAD // 2))[None, :]
    inside = live & (channel < HEAD // 2)
    tl.store(base_ptr + at + channel, first, mask=inside)
    tl.store(base_ptr + at + HEAD // 2 + channel, second, mask=inside)


@triton.jit
def sum_slices(acc, SPLIT: tl.constexpr):
    """What each warp has found of a lone vector, from its sums [CHAINS * SPLIT, ROWS, 8]: [SPLIT, ROWS, 1].

    They are added in the order of :func:`sum_chains`, which adds those of several vectors.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    own = tl.arange(0, CHAINS)[:, None, None, None] == tl.arange(0, 8)[None, None, None, :]
    acc = tl.reshape(acc, (CHAINS, SPLIT, acc.shape[1], 8))
    sums = tl.sum(tl.where(own, acc, 0.0), 0)
    sums = tl.reshape(sums, (SPLIT, acc.shape[2], 2, 2, 2))
    return tl.sum(tl.sum(tl.sum(sums, 4), 2), 2)[:, :, None]


@triton.jit
def add_neighbours(x):
    """Neighbours along the last of three axes added: half as many."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return even + odd


@triton.jit
def add_all(x):
    """Sum over the last of three axes (at most 16), as a fixed tree: [A, B, 1].

    Asked to ``split`` that axis, the compiler gives each thread all of it at once, in one exchange through shared
    memory. A reduction between warps would take three, with up to 8 lanes at a bank.
    """
    if x.shape[2] > 8:
        x = add_neighbours(x)
    if x.shape[2] > 4:
        x = add_neighbours(x)
    if x.shape[2] > 2:
        x = add_neighbours(x)
    if x.shape[2] > 1:
        x = add_neighbours(x)
    return x


@triton.jit
def sum_chains(acc, SPLIT: tl.constexpr):
    """The warps' sums [CHAINS * SPLIT, ROWS, COLUMNS], chains added: [SPLIT, ROWS, COLUMNS], within each thread.

    Of chains 4a + 2b + c those that differ in c first, then in a, then in b.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    if CHAINS == 8:
        acc = tl.reshape(acc, (2, 2, 2, SPLIT, acc.shape[1], acc.shape[2]))
        acc = tl.sum(tl.sum(acc, 2), 0)
    elif CHAINS == 4:
        acc = tl.sum(tl.reshape(acc, (2, 2, SPLIT, acc.shape[1], acc.shape[2])), 1)
    elif CHAINS < 4:
        acc = tl.reshape(acc, (CHAINS, SPLIT, acc.shape[1], acc.shape[2]))
    return tl.sum(acc, 0)


@triton.jit
def sum_warps(acc, SPLIT: tl.constexpr):
    """What the warps of a program have found of their shares of K, added: [ROWS, COLUMNS]."""
    shares = tl.permute(sum_chains(acc, SPLIT), (1, 2, 0))
    return tl.reshape(add_all(shares), (shares.shape[0], shares.shape[1]))


@triton.jit
def wait_for_producers():
    """Block until every launch before this one has finished and its stores are visible."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def qkv_5120x2048_rope_window(
    x_ptr,
    weight_ptr,
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    rope_table_ptr,
    q_ptr,
    cache_ptr,
    positions_ptr,
    seqs_ptr,
    block_table_ptr,
    arrivals_ptr,
    B,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
    Q_FIRST: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """qkv [B, 5120] = x [B, 2048] times weight; heads are normed, rotated and stored."""
    release_dependents()
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first = head * HEAD + part * TILE
    rows = HEAD - part * TILE
    groups = row_groups(TILE)
    each = tl.arange(0, 8)[:, None]
    live = each < B
    position = tl.load(positions_ptr + each, mask=live, other=0)
    seq = tl.load(seqs_ptr + each, mask=live, other=-1)
    weight_rows = weight_ptr + first.to(tl.int64) * K
    tile = load_weights(weight_rows, groups, rows, 0, K, SPLIT, STEPS, EVEN)
    # Above: nothing that this step writes. Below: what its launches have made.
    wait_for_producers()
    acc = tl.zeros((CHAINS * SPLIT, TILE, 8), tl.float32)
    acc = accumulate(acc, tile, weight_rows, groups, rows, x_ptr, None, K, SPLIT, STEPS, EVEN)
    vector = tl.arange(0, 1)[None, :]
    y = sum_warps(sum_slices(acc, SPLIT), SPLIT)
    row = tl.arange(0, TILE)[:, None]
    tl.store(qkv_ptr + vector * N + first + row, round_bf16(y), mask=(row < rows) & (vector < B))
    # The last program of a head finds all its channels and finishes the head, for all rows of the step.
    if arrive_last(arrivals_ptr + head, PARTS):
        low, high = load_halves(qkv_ptr, each * N + head * HEAD, live, HEAD)
        if (head >= Q_FIRST) & (head < Q_FIRST + Q_HEADS):
            q_low, q_high = load_head_vector(q_norm_ptr, HEAD)
            q_low, q_high = norm_halves(low, high, q_low, q_high, HEAD, Q_EPS)
            cosine, sine = load_angles(rope_table_ptr, position, live, HEAD)
            q_low, q_high = rotate_halves(q_low, q_high, cosine, sine)
            store_halves(q_ptr, (each * Q_HEADS + head - Q_FIRST) * HEAD, live, q_low, q_high, HEAD)
        else:
            # Padded rows have sequence -1: they own no page.
            written = seq >= 0
            page = page_of(block_table_ptr, seq, position, COLUMNS, written, PAGE, RING=True)
            if (head >= K_FIRST) & (head < K_FIRST + KV_HEADS):
                k_low, k_high = load_head_vector(k_norm_ptr, HEAD)
                k_low, k_high = norm_halves(low, high, k_low, k_high, HEAD, K_EPS)
                cosine, sine = load_angles(rope_table_ptr, position, live, HEAD)
                k_low, k_high = rotate_halves(k_low, k_high, cosine, sine)
                at = cache_at(page, 0, head - K_FIRST, position, KV_HEADS, PAGE, HEAD)
                store_halves(cache_ptr, at, written, k_low, k_high, HEAD)
            else:
                at = cache_at(page, 1, head - V_FIRST, position, KV_HEADS, PAGE, HEAD)
                store_halves(cache_ptr, at, written, round_bf16(low), round_bf16(high), HEAD)
