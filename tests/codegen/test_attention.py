"""Attention kernels in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_cases import Rows, Sizes, rows
from launches import interpret
from tolerance import assert_close
from torch import Tensor

from flintc.codegen.families.attention import PROGRAMS, SEGMENT
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
RUNS_OF_STRIPS = Sizes(heads=8, kv_heads=1, head=128, page=64, chunk=256)
KINDS = {
    "full": FULL, "window": WINDOW,
    "strip": STRIP_OF_ONE, "strips": STRIPS, "run": RUN_OF_STRIPS, "runs": RUNS_OF_STRIPS,
}  # fmt: skip


def reference(step: Rows, kind: str = "unfused") -> dict[str, Tensor]:
    """Every value the ops make."""
    graph = step.sizes.graph(kind)
    given = dict(step.given)
    for launch in graph.launches:
        given.update(run_launch(graph, launch, given, splits=step.env["S"]))
    return given


def attention(step: Rows, kind: str = "attention") -> Tensor:
    """The kernels' output."""
    return interpret(step.sizes.graph(kind), step.given, **step.env)["y"]


def check(step: Rows) -> None:
    """Both one launch and two compute what the reference does; under a window, the same to the last bit.

    Over the whole context one launch has a partial for each run of tiles, two have one for each chunk.
    """
    fused, unfused, want = attention(step), attention(step, "unfused"), reference(step)["y"]
    runs = step.sizes.window is None
    assert runs or torch.equal(fused, unfused)
    rounding = probability_rounding(step)
    assert_close(unfused, want, roundings=2, slack=0.0 if step.sizes.one_tile else rounding)
    assert_close(fused, want, roundings=2, slack=rounding if runs or not step.sizes.one_tile else 0.0)


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
    """One run and several, and those of the smaller tile merged by the last few programs."""
    check(rows(sizes, [position], [0]))
    (kernel,) = plan(sizes.graph("attention")).kernels.values()
    assert "attend_strips" in kernel.source


@pytest.mark.parametrize(
    "sizes",
    [FULL, Sizes(heads=6, kv_heads=2, head=24), Sizes(heads=32, kv_heads=1, head=16), Sizes(heads=2, sinks=False)],
    ids=lambda s: f"{s.heads}of{s.kv_heads}",
)
def test_one_program_merges_or_several_do(sizes: Sizes) -> None:
    """The last row that one program merges, the first that the last few do, and one of as many runs as there may be.

    Groups of fewer heads than there are runs, and of more.
    """
    check(rows(sizes, [16 * SEGMENT - 1, 16 * SEGMENT, 16 * PROGRAMS - 1], [0, 1, 2]))


def test_more_tiles_than_programs() -> None:
    """Runs of two and three tiles, the last tile not full."""
    check(rows(FULL, [16 * 2 * PROGRAMS + 70], [0]))


def test_long_short_and_padded_rows_in_one_batch() -> None:
    step = rows(FULL, [700, 0, 3, 16 * SEGMENT + 9, 0, 1100], [0, -1, 1, 2, -1, 3])
    check(step)
    assert not attention(step)[[1, 4]].any()


def test_runs_of_one_chunk_are_its_partials() -> None:
    """Where a chunk is a tile and one program merges, nothing differs from two launches."""
    step = rows(FULL, [37, 0, 16 * SEGMENT - 1], [0, 1, 2])
    assert torch.equal(attention(step), attention(step, "unfused"))


@pytest.mark.parametrize("chunk", [8, 16, 24, 48, 64, 100, 128, 512])
def test_a_row_has_no_more_runs_than_chunks(chunk: int) -> None:
    """The partials of runs are laid out as those of chunks."""
    (kernel,) = plan(replace(FULL, chunk=chunk).graph("attention")).kernels.values()
    tile, least, most = (int(kernel.constants[name]) for name in ("TILE", "MIN_RUN", "PROGRAMS"))
    for position in range(5000):
        tiles = position // tile + 1
        runs = min(-(-tiles // least), most)
        assert 1 <= runs <= min(tiles, position // chunk + 1)


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
    y = attention(step)
    slack = 0.0 if sizes.one_tile else probability_rounding(step)
    assert_close(y, reference(step)["y"], roundings=2, slack=slack)
    if sink >= 200:
        assert not y.any()
    elif sink <= -200:
        assert torch.equal(y, attention(replace(step, sizes=replace(sizes, sinks=False))))


def test_the_sink_counts_once_however_many_splits() -> None:
    """Values of one make the output the share of the denominator that is not the sink's."""
    step = rows(FULL, [100], [0])
    cache = step.cache.clone()
    cache[:, 1][~cache[:, 1].isnan()] = 1.0
    cache[:, 0][~cache[:, 0].isnan()] = 0.0
    step = replace(step, cache=cache, sinks=torch.full_like(step.sinks, 4.0))
    share = 101 / (101 + torch.tensor(4.0).exp())
    assert_close(attention(step), share.expand(1, 128))


def test_without_sinks() -> None:
    check(rows(replace(FULL, sinks=False), [50, 7], [0, 1]))
    check(rows(replace(WINDOW, sinks=False), [50, 7], [0, 1]))
    check(rows(replace(STRIPS, sinks=False), [50, 7], [0, 1]))


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_padded_rows_give_zeros_and_write_no_partial(sizes: Sizes) -> None:
    step = rows(sizes, [20, 0, 33, 0], [1, -1, 0, -1])
    check(step)
    assert not attention(step)[[1, 3]].any()
    made = interpret(sizes.graph("attention_partial"), step.given, **step.env)
    for name in ("o", "m", "l"):
        assert made[name][[1, 3]].isnan().all()


@pytest.mark.parametrize("sizes", [FULL, WINDOW, Sizes(page=64, chunk=128)], ids=["full", "window", "tiles"])
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
    torch.testing.assert_close(made["m"][written], want["m"][written], rtol=0, atol=slack)
    torch.testing.assert_close(made["l"][written], want["l"][written], rtol=2 * slack + sizes.chunk * 2.0**-24, atol=0)
    if sizes.one_tile:
        assert_close(made["o"][written], want["o"][written])
    else:
        size = reference(replace(step, cache=absolute_values(step.cache)), "attention_partial")["o"]
        assert_close(made["o"][written], want["o"][written], slack=size[written] * 2.0**-8)


def test_merge_from_the_reference_partials() -> None:
    for sizes in (FULL, WINDOW):
        step = rows(sizes, [47, 0, 300], [0, -1, 1])
        given = reference(step, "unfused")
        made = interpret(sizes.graph("attention_merge"), given, **step.env)
        assert_close(made["y"], given["y"])


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_a_row_does_not_depend_on_the_others(sizes: Sizes) -> None:
    step = rows(sizes, [40, 12, 0, 41, 16 * SEGMENT + 20], [0, 1, -1, 0, 2])
    together = attention(step)
    for row in range(5):
        alone = step.only(row)
        assert torch.equal(attention(alone)[0], together[row])


@pytest.mark.parametrize(("window", "positions"), [(513, [511, 512, 513, 514]), (None, [1040])])
def test_full_width(window: int | None, positions: list[int]) -> None:
    """Flint's own sizes, around the edge of its window."""
    sizes = Sizes(heads=32, kv_heads=4, head=128, page=64, chunk=512, window=window)
    check(rows(sizes, positions, list(range(len(positions)))))


def test_no_kernel_before_attention_is_lowered() -> None:
    graph = build(bind_defaults(load_spec("tiny-flint")))
    with pytest.raises(VerificationError, match=r"L0\.attention: attention has no kernel before it is lowered"):
        plan(graph)
