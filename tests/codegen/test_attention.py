"""Attention kernels in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_cases import Rows, Sizes, rows
from launches import interpret
from tolerance import assert_close
from torch import Tensor

from flintc.codegen.families.attention import SEGMENT
from flintc.codegen.planner import plan
from flintc.errors import VerificationError
from flintc.ir.build import build
from flintc.reference import run_launch
from flintc.spec import bind_defaults, load_spec

FULL, WINDOW = Sizes(), Sizes(window=13)
#: A window whose chunks are attended in registers: of one warp, and of four as at Flint's sizes.
STRIP_OF_ONE = Sizes(heads=6, kv_heads=2, head=64, page=32, chunk=16, window=40)
STRIPS = Sizes(heads=8, kv_heads=1, head=128, page=64, chunk=64, window=130)
#: The whole context in registers: runs of a tile each, and of as many tiles as Flint's at least.
RUN_OF_STRIPS = Sizes(heads=6, kv_heads=2, head=64, page=16, chunk=16)
RUNS_OF_STRIPS = Sizes(heads=8, kv_heads=1, head=128, page=64, chunk=128)
#: Runs of several chunks as soon as a row has more than three, and such whose chunks end within a tile of 32.
FEW_RUNS = Sizes(partials=3)
UNEVEN_RUNS = Sizes(chunk=24, partials=3)
KINDS = {
    "full": FULL, "window": WINDOW,
    "strip": STRIP_OF_ONE, "strips": STRIPS, "run": RUN_OF_STRIPS, "runs": RUNS_OF_STRIPS,
    "few": FEW_RUNS, "uneven": UNEVEN_RUNS,
}  # fmt: skip
#: One launch that merges what it finds, and two: as :meth:`Sizes.graph` makes them.
LAUNCHES = ("attention", "unfused")


def reference(step: Rows, kind: str = "unfused") -> dict[str, Tensor]:
    """Every value the ops make."""
    graph = step.sizes.graph(kind)
    given = dict(step.given)
    for launch in graph.launches:
        given.update(run_launch(graph, launch, given))
    return given


def attention(step: Rows, kind: str = "attention") -> Tensor:
    """The kernels' output."""
    return interpret(step.sizes.graph(kind), step.given, **step.env)["y"]


def check(step: Rows) -> tuple[Tensor, Tensor]:
    """Both one launch and two compute what the reference does; their partials are the same to the last bit.

    They merge these in other orders, and round the outcome once. Returns the outputs of both.
    """
    fused, unfused = (interpret(step.sizes.graph(kind), step.given, **step.env) for kind in LAUNCHES)
    for name in ("o", "m", "l"):
        assert torch.equal(bits(fused[name]), bits(unfused[name]))
    assert_close(fused["y"], unfused["y"])
    want, slack = reference(step)["y"], 0.0 if step.exact else probability_rounding(step)
    for made in (fused, unfused):
        assert_close(made["y"], want, roundings=2, slack=slack)
    return fused["y"], unfused["y"]


def bits(x: Tensor) -> Tensor:
    """FP32 as integers: so NaN, which is what nobody wrote, is equal to itself."""
    return x.view(torch.int32)


def probability_rounding(step: Rows) -> Tensor:
    """How far the output may move where p is rounded relative to another maximum than the reference's.

    A chunk or run of several tiles rounds p = exp(s - m) relative to the maximum so far; the reference knows the
    chunk's. Each p is then within 2^-9 of itself on either side, so y moves by at most 2^-8 * sum(p * |v|) / sum(p).
    """
    return reference(replace(step, cache=absolute_values(step.cache)))["y"].float() * 2.0**-8


def absolute_values(cache: Tensor) -> Tensor:
    """The cache with |v| for v."""
    cache = cache.clone()
    cache[:, 1] = cache[:, 1].abs()
    return cache


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_uneven_lengths_in_one_batch(sizes: Sizes, batch: int) -> None:
    positions = [37, 0, 12, 100, 15, 16, 17, 5][:batch]
    check(rows(sizes, positions, list(range(batch))))


@pytest.mark.parametrize("position", [11, 12, 13, 14, 24, 25, 26, 31, 32])
def test_window_edge_and_ring_wrap(position: int) -> None:
    """Around the first position that no longer sees token 0, and where the ring's pages are used again."""
    check(rows(WINDOW, [position], [0]))


@pytest.mark.parametrize("position", [14, 15, 16, 31, 32])
def test_chunk_boundaries(position: int) -> None:
    check(rows(FULL, [position], [0]))


def test_rows_of_one_sequence_see_their_own_past_only() -> None:
    for sizes in KINDS.values():
        check(rows(sizes, [40, 41, 42], [1, 1, 1]))


@pytest.mark.parametrize("position", [0, 38, 39, 40, 47, 48, 55, 56, 300])
@pytest.mark.parametrize("sizes", [STRIP_OF_ONE, STRIPS], ids=["strip", "strips"])
def test_strips_at_a_windows_edges(sizes: Sizes, position: int) -> None:
    """Where the window, a chunk and a page begin or end; and far beyond, in ring slots used again."""
    check(rows(sizes, [position], [0]))
    (kernel,) = plan(sizes.graph("attention")).kernels.values()
    assert "attend_chunk" in kernel.source


@pytest.mark.parametrize("position", [0, 15, 16, 255, 256, 1100])
@pytest.mark.parametrize("sizes", [RUN_OF_STRIPS, RUNS_OF_STRIPS], ids=["run", "runs"])
def test_runs_of_strips_over_the_whole_context(sizes: Sizes, position: int) -> None:
    """One run and several; 1100 is in the 69th chunk of 16, of which runs have three or four."""
    made = rows(sizes, [position], [0])
    check(made)
    one_row, several = sorted(plan(sizes.graph("attention")).kernels.values(), key=lambda kernel: kernel.name)
    assert one_row.several == several.name
    assert all("attend_strips" in kernel.source for kernel in (one_row, several))


@pytest.mark.parametrize(
    "sizes",
    [FULL, Sizes(heads=6, kv_heads=2, head=24), Sizes(heads=32, kv_heads=1, head=16), Sizes(heads=2, sinks=False)],
    ids=lambda s: f"{s.heads}of{s.kv_heads}",
)
def test_rows_of_one_segment_and_of_several(sizes: Sizes) -> None:
    """The last row that is one segment, the first that is two, and one of as many partials as there may be.

    Groups of fewer heads than there are partials, and of more.
    """
    check(rows(sizes, [16 * SEGMENT - 1, 16 * SEGMENT, 16 * sizes.partials - 1], [0, 1, 2]))


def test_more_chunks_than_partials() -> None:
    """Runs of two and three tiles, the last tile not full."""
    check(rows(FULL, [16 * 2 * FULL.partials + 70], [0]))


@pytest.mark.parametrize(
    "sizes",
    [
        FEW_RUNS,
        replace(FULL, partials=1),
        replace(FULL, partials=SEGMENT),
        replace(FULL, partials=SEGMENT + 1),
        replace(FULL, sinks=False, partials=2),
        UNEVEN_RUNS,
        Sizes(page=64, chunk=24, partials=5),
        Sizes(page=6, chunk=24, partials=2),
        Sizes(heads=8, kv_heads=1, head=24, chunk=8, partials=3),
        Sizes(page=64, chunk=100, partials=2),
        Sizes(heads=2, kv_heads=1, head=64, page=64, chunk=48, partials=3),
        replace(RUN_OF_STRIPS, partials=3),
        replace(RUN_OF_STRIPS, chunk=32, page=32, partials=3),
        replace(RUNS_OF_STRIPS, partials=2),
    ],
    ids=lambda s: f"{s.heads}of{s.kv_heads}x{s.head}-page{s.page}-chunk{s.chunk}-partials{s.partials}",
)
def test_runs_of_several_chunks(sizes: Sizes) -> None:
    """The last row whose runs are a chunk each, the first in which one is two, some uneven runs, and a short row.

    Tiles that are a chunk, half of one, and such that a chunk ends within: 24 and 48 positions in tiles of 32 and 64.
    """
    full = sizes.chunk * sizes.partials
    check(rows(sizes, [full - 1, full, 2 * full + sizes.chunk + sizes.chunk // 2, 5], [0, 1, 2, 3]))


@pytest.mark.parametrize("page", [8, 64])
@pytest.mark.parametrize("chunk", [8, 16, 24, 48, 64, 100, 128, 512])
def test_splits_cover_what_the_rule_says(chunk: int, page: int) -> None:
    """Each position in one split of its row, and no other: values count the positions by the ones in their numbers.

    All scores are zero, so that a partial is a sum of values, which is exact.
    """
    sizes = replace(FULL, chunk=chunk, page=page, partials=3)
    step = rows(sizes, [0, chunk - 1, 2 * chunk, 3 * chunk - 1, 3 * chunk, 6 * chunk + chunk // 2], [0] * 6)
    at = torch.arange(int(step.positions.max()) + 1)
    ones = (at[:, None] >> torch.arange(sizes.head) & 1).float()
    cache = step.cache.clone()
    pages = step.table[0, at // page].long()
    cache[pages, 0, :, at % page] = 0.0
    cache[pages, 1, :, at % page] = ones[:, None].bfloat16()
    made = interpret(sizes.graph("attention_partial"), replace(step, cache=cache).given, **step.env)
    for row, position in enumerate(step.positions.tolist()):
        n = position // chunk + 1
        k = min(n, sizes.partials)
        for j in range(k):
            first, end = j * n // k * chunk, min((j + 1) * n // k * chunk, position + 1)
            assert (made["l"][row, :, j] == end - first).all() and (made["m"][row, :, j] == 0).all()
            assert (made["o"][row, :, j] == ones[first:end].sum(0)).all()
        assert all(value[row, :, k:].isnan().all() for value in made.values())


def test_long_short_and_padded_rows_in_one_batch() -> None:
    step = rows(FULL, [700, 0, 3, 16 * SEGMENT + 9, 0, 1100], [0, -1, 1, 2, -1, 3])
    assert not any(y[[1, 4]].any() for y in check(step))


@pytest.mark.parametrize(
    "sizes", [FULL, UNEVEN_RUNS, RUN_OF_STRIPS, RUNS_OF_STRIPS], ids=["full", "uneven", "run", "runs"]
)
def test_partials_that_a_row_has_no_chunks_for_change_nothing(sizes: Sizes) -> None:
    """Runs of one chunk are its partials, however many a row may have; only the order of the merge may be another."""
    chunk = sizes.chunk
    step = rows(sizes, [2 * chunk + 5, 0, 3 * chunk - 1, chunk], [0, 1, 2, 3])
    few, many = (replace(step, sizes=replace(sizes, partials=n)) for n in (3, SEGMENT + 4))
    for kind in LAUNCHES:
        ours, theirs = (interpret(s.sizes.graph(kind), s.given, **s.env) for s in (few, many))
        for name in ("o", "m", "l"):
            assert torch.equal(bits(ours[name]), bits(theirs[name][:, :, :3].contiguous()))
            assert theirs[name][:, :, 3:].isnan().all()
        assert_close(ours["y"], theirs["y"])


def test_window_of_more_than_one_segment() -> None:
    check(rows(replace(FULL, window=16 * (SEGMENT + 2)), [700], [0]))


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(page=64, chunk=32),
        Sizes(page=64, chunk=128),
        Sizes(page=16, chunk=64, window=40),
        Sizes(page=6, chunk=24),
        Sizes(page=64, chunk=100),
        Sizes(heads=8, kv_heads=1, head=24, chunk=8),
        Sizes(heads=2, kv_heads=2, head=16),
        Sizes(heads=16, kv_heads=2, head=64, page=64, chunk=64),
        Sizes(heads=6, kv_heads=2, head=24, window=9),
        Sizes(heads=32, kv_heads=1, head=16),
        Sizes(heads=2, kv_heads=1, head=192, page=64, chunk=64),
        Sizes(heads=2, kv_heads=1, head=192, page=64, chunk=64, window=70),
    ],
    ids=lambda s: f"{s.heads}of{s.kv_heads}x{s.head}-page{s.page}-chunk{s.chunk}-window{s.window}",
)
def test_other_sizes(sizes: Sizes) -> None:
    """Several tiles a chunk, pages above and below a tile, groups of one, three and 32, odd head sizes."""
    check(rows(sizes, [150, 23, 70], [0, 2, 1]))


@pytest.mark.parametrize("sink", [-1e30, -200.0, -50.0, 50.0, 200.0, 1e30])
@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_sinks_far_from_the_scores(sizes: Sizes, sink: float) -> None:
    step = rows(sizes, [40, 3], [0, 1])
    step = replace(step, sinks=torch.full_like(step.sinks, sink))
    want, slack = reference(step)["y"], 0.0 if step.exact else probability_rounding(step)
    for kind in LAUNCHES:
        y = attention(step, kind)
        assert_close(y, want, roundings=2, slack=slack)
        if sink >= 200:
            assert not y.any()
        elif sink <= -200:
            assert torch.equal(y, attention(replace(step, sizes=replace(sizes, sinks=False)), kind))


@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("partials", [1, 3, 20])
def test_the_sink_counts_once_however_many_splits(partials: int, kind: str) -> None:
    """Values of one make the output the share of the denominator that is not the sink's."""
    step = rows(replace(FULL, partials=partials), [100], [0])
    cache = step.cache.clone()
    cache[:, 1][~cache[:, 1].isnan()] = 1.0
    cache[:, 0][~cache[:, 0].isnan()] = 0.0
    step = replace(step, cache=cache, sinks=torch.full_like(step.sinks, 4.0))
    share = 101 / (101 + torch.tensor(4.0).exp())
    assert_close(attention(step, kind), share.expand(1, 128))


def test_without_sinks() -> None:
    check(rows(replace(FULL, sinks=False), [50, 7], [0, 1]))
    check(rows(replace(WINDOW, sinks=False), [50, 7], [0, 1]))
    check(rows(replace(STRIPS, sinks=False), [50, 7], [0, 1]))


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_padded_rows_give_zeros_and_write_no_partial(sizes: Sizes) -> None:
    step = rows(sizes, [20, 0, 33, 0], [1, -1, 0, -1])
    assert not any(y[[1, 3]].any() for y in check(step))
    made = interpret(sizes.graph("attention_partial"), step.given, **step.env)
    for name in ("o", "m", "l"):
        assert made[name][[1, 3]].isnan().all()


@pytest.mark.parametrize(
    "sizes",
    [FULL, WINDOW, Sizes(page=64, chunk=128), FEW_RUNS, UNEVEN_RUNS, replace(RUN_OF_STRIPS, partials=5)],
    ids=["full", "window", "tiles", "few", "uneven", "run"],
)
def test_partials(sizes: Sizes) -> None:
    """Each partial against the reference; splits a row does not have stay unwritten."""
    step = rows(sizes, [47, 3, 200], [0, 1, 2])
    want = reference(step, "attention_partial")
    made = interpret(sizes.graph("attention_partial"), step.given, **step.env)
    written = ~want["m"].isnan()
    assert torch.equal(written, ~made["m"].isnan())
    assert torch.equal(written, ~made["l"].isnan())
    assert torch.equal(written[..., None].expand_as(made["o"]), ~made["o"].isnan())
    # Scores are sums of `head` products: two orders differ by at most this.
    largest = step.cache.nan_to_num().float().abs().amax(-1).max() * step.q.float().abs().sum(-1).max() * sizes.scale
    slack = float(largest) * sizes.head * 2.0**-24
    # Positions of the longest split: those of a chunk, or of its chunks where there are more of these than partials.
    chunks = int(step.positions.max()) // sizes.chunk + 1
    longest = sizes.chunk * (1 if sizes.window is not None else -(-chunks // sizes.partials))
    torch.testing.assert_close(made["m"][written], want["m"][written], rtol=0, atol=slack)
    torch.testing.assert_close(made["l"][written], want["l"][written], rtol=2 * slack + longest * 2.0**-24, atol=0)
    if step.exact:
        assert_close(made["o"][written], want["o"][written])
    else:
        size = reference(replace(step, cache=absolute_values(step.cache)), "attention_partial")["o"]
        assert_close(made["o"][written], want["o"][written], slack=size[written] * 2.0**-8)


def test_merge_from_the_reference_partials() -> None:
    for sizes in (FULL, WINDOW, FEW_RUNS, replace(FULL, partials=1), Sizes(heads=6, kv_heads=2, head=24, partials=5)):
        step = rows(sizes, [47, 0, 300], [0, -1, 1])
        given = reference(step, "unfused")
        made = interpret(sizes.graph("attention_merge"), given, **step.env)
        assert_close(made["y"], given["y"])


@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_a_row_does_not_depend_on_the_others(sizes: Sizes, kind: str) -> None:
    step = rows(sizes, [40, 12, 0, 41, 16 * SEGMENT + 20], [0, 1, -1, 0, 2])
    together = attention(step, kind)
    for row in range(5):
        alone = step.only(row)
        assert torch.equal(attention(alone, kind)[0], together[row])


@pytest.mark.parametrize(("window", "positions"), [(513, [511, 512, 513, 514]), (None, [1040, 8 * 1100])])
def test_full_width(window: int | None, positions: list[int]) -> None:
    """Flint's own sizes, around the edge of its window, and where a row has fewer and more chunks than partials."""
    chunk = 128 if window is None else 64
    sizes = Sizes(heads=32, kv_heads=4, head=128, page=64, chunk=chunk, window=window, partials=66)
    check(rows(sizes, positions, list(range(len(positions)))))


def test_no_kernel_before_attention_is_lowered() -> None:
    graph = build(bind_defaults(load_spec("tiny-flint")))
    with pytest.raises(VerificationError, match=r"L0\.attention: attention has no kernel before it is lowered"):
        plan(graph)
