"""KV bookkeeping against a plain simulation of what each page and ring slot holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flintc.errors import CapacityError, VerificationError
from flintc.ir.graph import Graph, Op, Value
from flintc.ir.types import TensorType
from flintc.runtime.kv import KvCache, KvLayout


def graph_of(layers, page=8, heads=2, head_dim=4):
    """A graph that holds nothing but cache writes; ``layers`` gives each layer's (window, ring pages) or None."""
    values, ops = {}, {}
    for i, ring in enumerate(layers):
        table = "block_table" if ring is None else f"block_table.w{ring[0]}"
        shape = ("Q", "T") if ring is None else ("Q", ring[1])
        values[table] = Value(table, TensorType("i32", shape), "input")
        pages = "P" if ring is None else f"{ring[1]}*Q"
        cache = TensorType("bf16", (pages, 2, heads, page, head_dim))
        for name in (f"L{i}.cache", f"L{i}.cache.1"):
            values[name] = Value(name, cache, "cache", i)
        inputs = (f"L{i}.k", f"L{i}.v", f"L{i}.cache", "positions", "seqs", table)
        attrs = {"v_heads": (0, heads), "window": ring[0] if ring else None}
        ops[f"L{i}.kv_write"] = Op(f"L{i}.kv_write", "kv_write", inputs, (f"L{i}.cache.1",), attrs, i)
    return Graph("caches", values, ops, (), ())


LAYOUT = KvLayout.from_graph(graph_of([None, (13, 3), None, (13, 3), (5, 2)]))


def test_layout_of_a_graph():
    assert LAYOUT.page == 8
    assert LAYOUT.table == "block_table"
    assert LAYOUT.rings == {"block_table.w13": (13, 3), "block_table.w5": (5, 2)}
    assert LAYOUT.rows == min(3 * 8 - 12, 2 * 8 - 4)
    assert LAYOUT.page_bytes() == 2 * (2 * 2 * 8 * 4 * 2)
    assert LAYOUT.ring_bytes(4) == (3 + 3 + 2) * (2 * 2 * 8 * 4 * 4)


def test_pages_of_two_sizes_are_refused():
    mixed = graph_of([None])
    other = graph_of([None, None], page=16)
    values = {**other.values, **mixed.values}
    with pytest.raises(VerificationError, match=r"\[8, 16\]"):
        KvLayout.from_graph(Graph("mixed", values, other.ops, (), ()))


def test_sizes_of_full_flint():
    # 14 full layers of 4 heads of 128 channels: 28 KiB per token; 35 rings of 9 pages hold at least 513 tokens.
    layers = [None] * 14 + [(513, 9)] * 35
    kv = KvCache(KvLayout.from_graph(graph_of(layers, page=64, heads=4, head_dim=128)), 262_144, 1)
    sizes = kv.nbytes()
    assert sizes["pool"] == 262_144 * 28 * 1024
    assert sizes["rings"] == 35 * 576 * 2048
    assert kv.layout.rows == 576 - 512


def test_rings_follow_the_rows_asked_for():
    wide = LAYOUT.with_rows(100)
    assert wide.rows >= 100
    assert wide.rings["block_table.w13"] == (13, 14)
    assert LAYOUT.with_rows(8).rings["block_table.w13"] == (13, 3)


def test_pages_are_shared_between_slots_and_reused():
    kv = KvCache(LAYOUT, context=32, slots=3, pages=6)
    a, b = kv.add(16), kv.add(32)
    for _ in range(2):
        kv.extend(a, 8)
        kv.extend(b, 8)
    kv.extend(b, 1)
    table = kv.tables["block_table"]
    pages = [*table[a, :2].tolist(), *table[b, :3].tolist()]
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert kv.highest_page == 4
    kv.finish(b)
    c = kv.add(32)
    assert c == b
    kv.extend(c, 8)
    assert kv.length(c) == 8
    assert table[c, 0] in pages[2:]


def test_ring_tables_are_fixed_and_disjoint():
    kv = KvCache(LAYOUT, context=64, slots=4)
    ring = kv.tables["block_table.w13"]
    assert ring.dtype == torch.int32
    assert sorted(ring.flatten().tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda kv: kv.add(65), "65 tokens .* context limit is 64"),
        (lambda kv: [kv.add(8) for _ in range(3)], "all 2 sequence slots"),
        (lambda kv: [kv.add(64), kv.add(8)], "need 1 KV pages of 8 tokens; 0 of 8"),
        (lambda kv: kv.extend(kv.add(10), 11), "11 tokens do not fit the 10"),
        (lambda kv: kv.extend(kv.add(64), 13), "13 rows .* ring takes 12"),
    ],
)
def test_refusals_change_nothing(ask, words):
    kv = KvCache(LAYOUT, context=64, slots=2, pages=8)
    with pytest.raises(CapacityError, match=words):
        ask(kv)
    assert all(kv.length(slot) == 0 for slot in range(2) if slot in kv._sequences)
    assert kv.highest_page <= 7


def test_fits_agrees_with_add():
    kv = KvCache(LAYOUT, context=64, slots=2, pages=8)
    assert kv.fits(64)
    kv.add(40)
    assert kv.fits(24)
    assert not kv.fits(25)
    kv.add(24)
    assert not kv.fits(1)


class Simulation:
    """Every ring position by position: slot of the ring -> position it holds."""

    def __init__(self, window, pages, page):
        self.window, self.size, self.held = window, pages * page, {}

    def write(self, positions):
        for p in positions:
            self.held[p % self.size] = p

    def can_continue(self, length):
        return all(self.held.get(p % self.size) == p for p in range(max(0, length - self.window + 1), length))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["extend", "cut"]), st.integers(1, 60)), max_size=30))
def test_cuts_agree_with_a_simulated_ring(steps):
    kv = KvCache(LAYOUT, context=4000, slots=2)
    rings = [Simulation(window, pages, 8) for window, pages in LAYOUT.rings.values()]
    slot = kv.add(4000)
    for action, amount in steps:
        if action == "extend":
            positions = kv.extend(slot, amount % LAYOUT.rows + 1)
            for ring in rings:
                ring.write(positions)
            continue
        length = max(0, kv.length(slot) - amount)
        assert kv.holds(slot, length) == all(ring.can_continue(length) for ring in rings)
        if kv.holds(slot, length):
            kv.cut(slot, length)
            assert kv.length(slot) == length
        else:
            with pytest.raises(CapacityError, match="recompute"):
                kv.cut(slot, length)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_page_belongs_to_two_sequences(data):
    kv = KvCache(LAYOUT, context=48, slots=3, pages=12)
    alive = []
    for _ in range(data.draw(st.integers(1, 40))):
        limit = data.draw(st.integers(1, 48))
        if kv.fits(limit) and data.draw(st.booleans()):
            alive.append((kv.add(limit), limit))
        elif alive:
            slot, limit = data.draw(st.sampled_from(alive))
            rows = data.draw(st.integers(1, 12))
            if kv.length(slot) + rows <= limit:
                kv.extend(slot, rows)
            elif data.draw(st.booleans()):
                kv.cut(slot, 0)
            else:
                kv.finish(slot)
                alive.remove((slot, limit))
        used = [
            page for slot, _ in alive for page in kv.tables["block_table"][slot, : -(-kv.length(slot) // 8)].tolist()
        ]
        assert len(used) == len(set(used))
        assert len(used) + len(kv._free_pages) == 12


def test_a_model_without_windows_or_without_full_layers():
    full = KvCache(KvLayout.from_graph(graph_of([None])), context=64, slots=1)
    slot = full.add(64)
    assert full.extend(slot, 64) == range(64)
    full.cut(slot, 1)
    windowed = KvCache(KvLayout.from_graph(graph_of([(13, 3)])), context=64, slots=1)
    assert set(windowed.tables) == {"block_table.w13"}
    slot = windowed.add(64)
    windowed.extend(slot, 12)
    assert windowed.highest_page == -1
