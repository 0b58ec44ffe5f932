"""act [B, 6, 512] = silu(gate) * up of the expert of each row and rank, and the same of the shared expert.

Ops:
  expert_linear: FP32 accumulate, expert scale on the accumulator, then `out`
  silu_mul: bf16(silu(g) * u), FP32 inside
  linear: FP32 accumulate, tensor scale on the accumulator, then `out`
  silu_mul: bf16(silu(g) * u), FP32 inside

Bound: N=1024, K=2048, TILE=16, SPLIT=8, CHAINS=2, STEPS=8, EVEN=True, RANKS=6, SHARED_WIDTH=1024, SHARED_SLOTS=2,
  SHARED_EVEN=True
"""

import triton
import triton.language as tl


INTERPRET: tl.constexpr = tl.constexpr(False)


@triton.jit
def dot_bf16(a, b, acc):
    """acc + a @ b for BF16 a and b (two- or three-dimensional), FP32 accumulate."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def load_vectors(
    x_ptr,
    count,
    k,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Part of the BF16 vectors [``count``, K] at ``x_ptr``, from column ``k`` of K on, as the other operand.

    It is [CHAINS * SPLIT, STEPS * 32 / CHAINS, COLUMNS]: a vector in each column, zeros in those left.
    """
    step = tl.arange(0, STEPS)[:, None, None, None, None]
    eight = tl.arange(0, COLUMNS // 8)[None, :, None, None, None]
    split = tl.arange(0, SPLIT)[None, None, :, None, None]
    lane = tl.arange(0, 32)[None, None, None, :, None]
    vector = eight * 8 + lane // 4
    column = k + (step * SPLIT + split) * 32 + lane % 4 * 8 + tl.arange(0, 8)[None, None, None, None, :]
    live = vector < count
    if not EVEN:
        live = live & (column < K)
    x = tl.load(x_ptr + vector * K + column, mask=live, other=0.0)
    # Axes: step, eight, split, vector of eight, lane of four, chain, its instructions, half of K, pair.
    x = tl.reshape(x, (STEPS, COLUMNS // 8, SPLIT, 8, 4, CHAINS, 2 // CHAINS, 2, 2))
    x = tl.permute(x, (5, 2, 0, 6, 7, 4, 8, 1, 3))
    return tl.reshape(x, (CHAINS * SPLIT, STEPS * 32 // CHAINS, COLUMNS))


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
    # Axes: step, group, split, row of eight, lane of four, chain, its instructions, half of K, pair.
    tile = tl.reshape(tile, (STEPS, GROUPS, SPLIT, 8, 4, CHAINS, 2 // CHAINS, 2, 2))
    tile = tl.permute(tile, (5, 2, 1, 3, 0, 6, 7, 4, 8))
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
    """acc + weight rows x vectors over all of K: FP32 [CHAINS * SPLIT, ROWS, COLUMNS], its first axis not yet summed.

    ``tile`` is the first tile of the rows, loaded by the caller; each further one is loaded a tile ahead.
    """
    CHAINS: tl.constexpr = acc.shape[0] // SPLIT
    for k in tl.static_range(0, K, SPLIT * STEPS * 32):
        x = load_vectors(x_ptr, count, k, K, acc.shape[2], SPLIT, CHAINS, STEPS, EVEN)
        weights = weight_operand(tile, CHAINS)
        ahead = k + SPLIT * STEPS * 32
        if ahead < K:
            tile = load_weights(rows_ptr, groups, rows, ahead, K, SPLIT, STEPS, EVEN)
        acc = dot_bf16(weights, x, acc)
    return acc


@triton.jit
def first_column(acc):
    """The first column of sums [SUMS, ROWS, COLUMNS], as [SUMS, ROWS, 1]."""
    first = tl.arange(0, acc.shape[2])[None, None, :] == 0
    return tl.sum(tl.where(first, acc, 0.0), 2, keep_dims=True)


@triton.jit
def paired_row_groups(TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Groups of a tile that alternate: eight gate rows, then the eight up rows of theirs, WIDTH further on."""
    group = tl.arange(0, TILE // 8)
    return group // 2 * 8 + group % 2 * WIDTH


@triton.jit
def release_dependents():
    """Let the next launch start. Publishes nothing: the next launch's wait does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


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
def silu_mul(gate, up):
    """bf16(silu(gate) * up), FP32 inside. Gate and up are what their op's output dtype made of them."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return round_bf16(gate / (1.0 + tl.exp(-gate)) * up)


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
    """The warps' sums [CHAINS * SPLIT, ROWS, COLUMNS], chains added: [SPLIT, ROWS, COLUMNS], within each thread."""
    return tl.sum(tl.reshape(acc, (acc.shape[0] // SPLIT, SPLIT, acc.shape[1], acc.shape[2])), 0)


@triton.jit
def sum_pairs(acc, SPLIT: tl.constexpr):
    """The same of a paired tile: gate and up, each [ROWS / 2, COLUMNS]."""
    ROWS: tl.constexpr = acc.shape[1]
    COLUMNS: tl.constexpr = acc.shape[2]
    shares = tl.reshape(sum_chains(acc, SPLIT), (SPLIT, ROWS // 16, 2, 8, COLUMNS))
    shares = tl.permute(shares, (1, 3, 4, 2, 0))
    both = add_all(tl.reshape(shares, (ROWS // 2 * COLUMNS, 2, SPLIT)))
    gate, up = tl.split(tl.reshape(both, (ROWS // 2, COLUMNS, 2)))
    return gate, up


@triton.jit
def wait_for_producers():
    """Block until every launch before this one has finished and its stores are visible."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def expert_gate_up_1024x2048_shared(
    x_ptr,
    ids_ptr,
    weight_ptr,
    shared_ptr,
    act_ptr,
    shared_act_ptr,
    B,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    RANKS: tl.constexpr,
    SHARED_WIDTH: tl.constexpr,
    SHARED_SLOTS: tl.constexpr,
    SHARED_EVEN: tl.constexpr,
):
    """act [B, 6, 512] = silu(gate) * up of the expert of each row and rank, and the same of the shared expert."""
    release_dependents()
    slot, vector = tl.program_id(1), tl.program_id(2)
    # The shared expert comes first: its weights are known, and fetched above the wait.
    # Its programs of the first vector serve all vectors, those of the others have nothing to do.
    if (slot < SHARED_SLOTS) & (vector > 0):
        wait_for_producers()
        return
    if slot < SHARED_SLOTS:
        first = (slot * tl.num_programs(0) + tl.program_id(0)) * (TILE // 2)
        rows = 2 * SHARED_WIDTH - first
        groups = paired_row_groups(TILE, SHARED_WIDTH)
        shared_rows = shared_ptr + first.to(tl.int64) * K
        tile = load_weights(shared_rows, groups, rows, 0, K, SPLIT, STEPS, SHARED_EVEN)
        wait_for_producers()
        acc = tl.zeros((CHAINS * SPLIT, TILE, 8), tl.float32)
        acc = accumulate(acc, tile, shared_rows, groups, rows, x_ptr, B, K, SPLIT, STEPS, SHARED_EVEN)
        gate, up = sum_pairs(acc, SPLIT)
        # Gate and up are outputs of a BF16 op: rounded before they meet.
        gate, up = round_bf16(gate), round_bf16(up)
        row = first + tl.arange(0, TILE // 2)[:, None]
        column = tl.arange(0, 8)[None, :]
        at = column * SHARED_WIDTH + row
        tl.store(shared_act_ptr + at, silu_mul(gate, up), mask=(row < SHARED_WIDTH) & (column < B))
        return
    product = vector * RANKS + slot - SHARED_SLOTS
    first = tl.program_id(0) * (TILE // 2)
    groups = paired_row_groups(TILE, N // 2)
    rows = N - first
    row = first + tl.arange(0, TILE // 2)
    # Which expert it is has been decided in this step: nothing of it can be fetched above.
    wait_for_producers()
    expert = tl.load(ids_ptr + product).to(tl.int64)
    if expert < 0:
        # A padded row reads no expert.
        tl.store(act_ptr + product * (N // 2) + row, 0.0, mask=row < N // 2)
        return
    weight_rows = weight_ptr + (expert * N + first) * K
    tile = load_weights(weight_rows, groups, rows, 0, K, SPLIT, STEPS, EVEN)
    # One vector of the eight that an instruction multiplies.
    x = x_ptr + vector * K
    acc = tl.zeros((CHAINS * SPLIT, TILE, 8), tl.float32)
    acc = accumulate(acc, tile, weight_rows, groups, rows, x, 1, K, SPLIT, STEPS, EVEN)
    gate, up = sum_pairs(first_column(acc), SPLIT)
    tl.store(act_ptr + product * (N // 2) + row[:, None], silu_mul(gate, up), mask=row[:, None] < N // 2)
