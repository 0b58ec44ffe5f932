"""Attention, its cache and its merge, against a naive softmax over a plain list of keys in FP64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flintc.ir.graph import Op
from flintc.reference import Context, run_op

FP32 = Context("fp32")
ROUNDED = Context("rounded")


class Paged:
    """A paged cache of ``seqs`` sequences with shuffled pages, filled with NaN: what nobody wrote must not be read."""

    def __init__(self, seqs: int, capacity: int, kv: int, head: int, page: int, window: int | None, seed: int = 0):
        columns = -(-capacity // page)
        if window is not None:
            columns = math.ceil((window - 1 + 8) / page)
        self.window, self.page = window, page
        order = torch.randperm(seqs * columns, generator=torch.Generator().manual_seed(seed))
        self.table = order.view(seqs, columns).int()
        self.cache = torch.full((seqs * columns, 2, kv, page, head), torch.nan)

    def write(self, k: Tensor, v: Tensor, positions: Tensor, seqs: Tensor, context: Context = FP32) -> None:
        attrs = {"v_heads": (0, v.shape[1]), "window": self.window}
        op = Op("kv_write", "kv_write", ("k", "v", "c", "p", "s", "t"), ("c1",), attrs)
        inputs = {"k": k, "v": v, "c": self.cache, "p": positions, "s": seqs, "t": self.table}
        made = run_op(op, inputs, context)
        assert made["c1"] is self.cache

    def attend(
        self,
        q: Tensor,
        positions: Tensor,
        seqs: Tensor,
        scale: float,
        sinks: Tensor | None = None,
        chunk: int | None = None,
        context: Context = FP32,
        partials: int = 66,
    ) -> Tensor:
        """Unlowered, or with ``chunk`` as partials and a merge; of the whole context, at most so many ``partials``."""
        inputs = {"q": q, "c": self.cache, "p": positions, "s": seqs, "t": self.table, "sinks": sinks}
        tail = () if sinks is None else ("sinks",)
        ports = ("q", "c", "p", "s", "t")
        attrs = {"scale": scale, "window": self.window}
        if chunk is None:
            return run_op(Op("a", "attention", (*ports, *tail), ("y",), attrs), inputs, context)["y"]
        cut = {"chunk": chunk, "window": self.window, "partials": partials if self.window is None else None}
        inputs |= run_op(Op("p", "attention_partial", ports, ("o", "m", "l"), {"scale": scale, **cut}), inputs, context)
        merge = Op("m", "attention_merge", ("o", "m", "l", "p", "s", *tail), ("y",), cut)
        return run_op(merge, inputs, context)["y"]


def naive(q: Tensor, keys: Tensor, values: Tensor, position: int, scale: float, window: int | None, sinks=None):
    """One row in FP64: q [heads, head], keys and values [positions, kv, head] -> [heads * head]."""
    first = 0 if window is None else max(0, position - window + 1)
    out = []
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // keys.shape[1])
        scores = [scale * float(q[head].double() @ keys[p, group].double()) for p in range(first, position + 1)]
        extra = [] if sinks is None else [float(sinks[head])]
        top = max(scores + extra)
        weights = [math.exp(s - top) for s in scores]
        total = sum(weights) + sum(math.exp(s - top) for s in extra)
        out.append(sum(w / total * values[first + i, group].double() for i, w in enumerate(weights)))
    return torch.cat(out)


@st.composite
def steps(draw: st.DrawFn, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """(sequence, position) of every row, each sequence in order, interleaved and cut into steps of up to 8 rows."""
    turns = draw(st.permutations([seq for seq, length in enumerate(lengths) for _ in range(length)]))
    seen = dict.fromkeys(range(len(lengths)), 0)
    rows = []
    for seq in turns:
        rows.append((seq, seen[seq]))
        seen[seq] += 1
    size = draw(st.integers(1, 8))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_matches_naive_attention(data: st.DataObject) -> None:
    """Random sizes, windows, lengths and sinks; rows arrive in steps of several rows of several sequences."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    kv, group, head = draw(st.sampled_from([(1, 1, 4), (2, 3, 8), (2, 2, 16)]))
    window = draw(st.sampled_from([None, 1, 2, 5, 13]))
    page, chunk = draw(st.sampled_from([(4, 4), (8, 16), (4, 6)]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    sinks = draw(st.sampled_from([None, torch.randn(kv * group) * 3]))
    partials = draw(st.sampled_from([1, 2, 3, 66]))
    keys, values = (torch.randn(len(lengths), 40, kv, head) for _ in range(2))
    queries = torch.randn(len(lengths), 40, kv * group, head)
    paged = Paged(len(lengths), 40, kv, head, page, window)
    for rows in draw(steps(lengths)):
        check_rows(paged, rows, keys, values, queries, chunk, partials, sinks)


def check_rows(paged: Paged, rows: list[tuple[int, int]], keys, values, queries, chunk, partials, sinks) -> None:
    """Write and attend in one step; compare every row, unlowered and lowered."""
    seqs, positions = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
    paged.write(keys[seqs, positions], values[seqs, positions], positions, seqs)
    q, scale = queries[seqs, positions], queries.shape[-1] ** -0.5
    expected = torch.stack(
        [naive(q[i], keys[s], values[s], p, scale, paged.window, sinks) for i, (s, p) in enumerate(rows)]
    )
    for lowered in (None, chunk):
        got = paged.attend(q, positions, seqs, scale, sinks, lowered, partials=partials)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def filled(length: int, window: int | None, values: Tensor, page: int = 64) -> Paged:
    """One sequence whose keys are all zero (so that every visible position weighs the same)."""
    paged = Paged(1, length, 1, values.shape[-1], page, window)
    for start in range(0, length, 8):
        at = torch.arange(start, min(start + 8, length))
        paged.write(torch.zeros(len(at), 1, values.shape[-1]), values[at], at.int(), torch.zeros(len(at)).int())
    return paged


@pytest.mark.parametrize("chunk", [None, 512])
@pytest.mark.parametrize(("position", "first"), [(511, 0), (512, 0), (513, 1), (514, 2)])
def test_full_window_edge(position: int, first: int, chunk: int | None) -> None:
    """Flint's window of 513 is the token itself and the 512 before it: position 513 is the first to lose one."""
    values = torch.zeros(position + 1, 1, 4)
    values[:, 0, 0] = (torch.arange(position + 1) < first).float()  # weight on positions out of sight
    values[:, 0, 1] = (torch.arange(position + 1) == first).float()  # the first position in sight
    values[:, 0, 2] = 1.0
    paged = filled(position + 1, 513, values)
    q, at, seqs = torch.ones(1, 1, 4), torch.tensor([position]).int(), torch.zeros(1).int()
    out = paged.attend(q, at, seqs, 0.5, chunk=chunk)[0]
    visible = position - first + 1
    assert visible == min(position + 1, 513)
    torch.testing.assert_close(out[:3], torch.tensor([0.0, 1 / visible, 1.0]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("chunk", "partials"), [(None, 66), (8, 66), (8, 3), (8, 1)])
@pytest.mark.parametrize(
    ("sink", "share"), [(1e4, 0.0), (200.0, 0.0), (math.log(30.0), 0.5), (0.0, 30 / 31), (-200.0, 1.0), (-1e4, 1.0)]
)
def test_sink_joins_the_denominator_once(sink: float, share: float, chunk: int | None, partials: int) -> None:
    """30 equal scores of 0 hold 30 / (30 + exp(sink)) of the weight, however many partials there are."""
    paged = filled(30, None, torch.ones(30, 1, 4), page=8)
    q, at, seqs = torch.ones(1, 1, 4), torch.tensor([29]).int(), torch.zeros(1).int()
    out = paged.attend(q, at, seqs, 0.5, torch.tensor([sink]), chunk, partials=partials)
    torch.testing.assert_close(out, torch.full((1, 4), share), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chunk", [None, 4])
def test_sink_is_not_scaled_and_is_per_head(chunk: int | None) -> None:
    """Scores far from zero: the sink competes with the scaled score, head by head."""
    paged = Paged(1, 1, 1, 4, 4, None)
    one = torch.zeros(1).int()
    paged.write(torch.full((1, 1, 4), 5.0), torch.ones(1, 1, 4), one, one)
    q = torch.stack((torch.full((4,), 10.0), torch.full((4,), -10.0)))[None]  # scores +50 and -50 at scale 0.25
    out = paged.attend(q, one, one, 0.25, torch.tensor([50.0, 0.0]), chunk).view(2, 4)
    torch.testing.assert_close(out[0], torch.full((4,), 0.5))
    assert 0 < out[1, 0] < 1e-20


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [None, 4])
def test_padded_rows_write_nothing_and_attend_to_nothing(window: int | None, chunk: int | None) -> None:
    paged = Paged(1, 16, 1, 4, 4, window)
    rows = torch.tensor([0, 0, 1]).int(), torch.tensor([-1, 0, -1]).int()
    paged.write(torch.ones(3, 1, 4) * torch.tensor([7.0, 1.0, 7.0])[:, None, None], torch.ones(3, 1, 4), *rows)
    assert paged.cache.isfinite().sum() == 8 and (paged.cache[paged.cache.isfinite()] == 1).all()
    out = paged.attend(torch.ones(3, 1, 4), *rows, 0.5, torch.zeros(1), chunk)
    assert (out[0] == 0).all() and (out[2] == 0).all() and (out[1] != 0).all()


def test_all_rows_padded() -> None:
    paged = Paged(1, 16, 1, 4, 4, None)
    rows = torch.zeros(2).int(), torch.full((2,), -1).int()
    paged.write(torch.ones(2, 1, 4), torch.ones(2, 1, 4), *rows)
    assert not paged.cache.isfinite().any()
    for chunk in (None, 4):
        assert (paged.attend(torch.ones(2, 1, 4), *rows, 0.5, chunk=chunk) == 0).all()


def partials_of(inputs: dict[str, Tensor], context: Context = ROUNDED, **attrs: object) -> dict[str, Tensor]:
    """o, m and l of an `attention_partial` over the whole context."""
    op = Op("p", "attention_partial", ("q", "c", "p", "s", "t"), ("o", "m", "l"), {"window": None, **attrs})
    return run_op(op, inputs, context)


def test_partials_past_the_row_are_unwritten() -> None:
    """Rows at positions 3 and 9 with chunks of 4 have 1 and 3 partials; the rest is NaN, and the merge skips it."""
    paged = filled(10, None, torch.ones(10, 1, 4), page=4)
    inputs = {"q": torch.ones(2, 1, 4), "c": paged.cache, "t": paged.table}
    inputs |= {"p": torch.tensor([3, 9]).int(), "s": torch.zeros(2).int()}
    made = partials_of(inputs, scale=1.0, chunk=4, partials=5)
    for value in made.values():
        assert value.shape[2] == 5 and value.dtype == torch.float32
        written = ~value.isnan()[:, 0].reshape(2, 5, -1).any(-1)
        unwritten = value.isnan()[:, 0].reshape(2, 5, -1).all(-1)
        assert written.tolist() == [[True] + [False] * 4, [True] * 3 + [False] * 2]
        assert (written ^ unwritten).all()
    assert made["l"][1, 0, :3].tolist() == [4.0, 4.0, 2.0]


#: Chunks of a row and the most partials -> first chunk of each split, and one past the last, as the rule says.
RUNS = {
    (1, 3): (0, 1), (2, 3): (0, 1, 2), (3, 3): (0, 1, 2, 3), (4, 3): (0, 1, 2, 4), (5, 3): (0, 1, 3, 5),
    (7, 3): (0, 2, 4, 7), (8, 3): (0, 2, 5, 8), (9, 3): (0, 3, 6, 9), (7, 1): (0, 7), (7, 5): (0, 1, 2, 4, 5, 7),
}  # fmt: skip


@pytest.mark.parametrize(("chunks", "partials"), RUNS)
@pytest.mark.parametrize("last", [1, 3, 4], ids=lambda n: f"{n} in the last chunk")
def test_runs_of_chunks_are_what_the_rule_says(chunks: int, partials: int, last: int) -> None:
    """Each partial against a softmax in FP64 over the very positions of its split; the last chunk need not be full."""
    torch.manual_seed(chunks)
    length, scale = 4 * (chunks - 1) + last, 0.3
    keys, values, q = torch.randn(length, 2, 8), torch.randn(length, 2, 8), torch.randn(1, 4, 8) * 3
    paged = Paged(1, length, 2, 8, 8, None)
    paged.write(keys, values, torch.arange(length).int(), torch.zeros(length).int())
    inputs = {"q": q, "c": paged.cache, "t": paged.table}
    inputs |= {"p": torch.tensor([length - 1]).int(), "s": torch.zeros(1).int()}
    made = partials_of(inputs, FP32, scale=scale, chunk=4, partials=partials)
    edges = RUNS[chunks, partials]
    assert made["m"].shape == made["l"].shape == (1, 4, partials) and made["o"].shape == (1, 4, partials, 8)
    for split, (first, end) in enumerate(pairwise(edges)):
        span = slice(4 * first, min(4 * end, length))
        for head in range(4):
            scores = scale * keys[span, head // 2].double() @ q[0, head].double()
            p = torch.exp(scores - scores.max())
            want = {"m": scores.max(), "l": p.sum(), "o": p @ values[span, head // 2].double()}
            for name, value in want.items():
                torch.testing.assert_close(made[name][0, head, split].double(), value, atol=1e-5, rtol=1e-5)
    for value in made.values():
        assert value[:, :, len(edges) - 1 :].isnan().all(), "a row with fewer chunks than partials has that many"


def test_a_row_has_as_many_runs_as_its_own_length_makes() -> None:
    """Beside longer and padded rows: 1, 2, 3, 3 and no partials, and as many positions in each as the rule gives."""
    paged = filled(28, None, torch.ones(28, 1, 4), page=4)
    inputs = {"q": torch.ones(5, 1, 4), "c": paged.cache, "t": paged.table}
    inputs |= {"p": torch.tensor([2, 7, 9, 27, 0]).int(), "s": torch.tensor([0, 0, 0, 0, -1]).int()}
    made = partials_of(inputs, scale=1.0, chunk=4, partials=3)
    assert made["l"][:, 0].nan_to_num(-1.0).tolist() == [[3, -1, -1], [4, 4, -1], [4, 4, 2], [8, 8, 12], [-1, -1, -1]]
    assert torch.equal(made["o"][:, 0, :, 0].nan_to_num(-1.0), made["l"][:, 0].nan_to_num(-1.0))


def drawn(length: int, heads: int, head: int, *, page: int) -> tuple[Paged, dict[str, Tensor], Tensor, Tensor]:
    """A BF16 cache, inputs of an attention of all its positions to it, and their keys and values."""
    k, v, q = (torch.randn(length, heads, head).bfloat16() for _ in range(3))
    paged = Paged(1, length, heads, head, page, None)
    paged.cache = paged.cache.bfloat16()
    at, seqs = torch.arange(length).int(), torch.zeros(length).int()
    paged.write(k, v, at, seqs, ROUNDED)
    return paged, {"q": q, "c": paged.cache, "p": at, "s": seqs, "t": paged.table}, k, v


def test_a_row_of_no_more_chunks_than_partials_has_the_partials_of_its_chunks() -> None:
    """Bit for bit, however many it might have."""
    torch.manual_seed(1)
    _, inputs, _, _ = drawn(28, 2, 8, page=4)
    few, many = (partials_of(inputs, scale=0.25, chunk=4, partials=n) for n in (7, 66))
    for name in ("o", "m", "l"):
        assert torch.equal(few[name].nan_to_num(-7.0), many[name][:, :, :7].nan_to_num(-7.0))
        assert many[name][:, :, 7:].isnan().all()


def test_rounding_points() -> None:
    """exp(s - m) is rounded for P.V and not in the denominator; o, m and l stay FP32; the output is rounded once."""
    torch.manual_seed(0)
    paged, inputs, k, v = drawn(8, 1, 16, page=8)
    inputs |= {name: inputs[name][7:] for name in "qps"}
    scores = (k[:, 0].double() @ inputs["q"][0, 0].double()) * 0.25
    p = torch.exp(scores - scores.max())
    o = p.float().bfloat16().double() @ v[:, 0].double()
    assert (o - p @ v[:, 0].double()).abs().max() > 1e-3  # the rounding of p is far above the tolerance below

    made = partials_of(inputs, scale=0.25, chunk=8, partials=1)
    assert all(value.dtype == torch.float32 for value in made.values())
    torch.testing.assert_close(made["o"][0, 0, 0].double(), o, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made["l"][0, 0, 0].double(), p.sum(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made["m"][0, 0, 0].double(), scores.max(), atol=1e-5, rtol=1e-5)

    out = paged.attend(*(inputs[name] for name in "qps"), 0.25, context=ROUNDED)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0], (o / p.sum()).bfloat16(), atol=0, rtol=2**-8)
