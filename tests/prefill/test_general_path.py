"""The general path of small models against the reference: lengths around the window, pages and chunk edges."""

from __future__ import annotations

import pytest
import torch
from prompts import CONTEXT, SLOTS, divergence, graph_of, logits, make_path, random_ids, weights_of

from flintc.runtime.executor import forward
from flintc.runtime.reference_executor import ReferenceExecutor

#: KL of a row between two orders of the same sums. Now and then rounding turns an expert's choice, which moves a row
#: far and others a little; a fault moves them all.
MOST_ROWS, MOST_KL, MEAN_KL = 0.8, 4e-3, 0.05


def reference(spec, weights, slots=SLOTS):
    given = weights_of(spec, weights)
    kinds = {name: v.kind for name, v in graph_of(spec, weights).values.items()}
    own = {name: t for name, t in given.items() if kinds[name] == "weight"}
    tables = {name: t for name, t in given.items() if kinds[name] == "table"}
    return ReferenceExecutor(graph_of(spec, weights), own, tables, "rounded", CONTEXT, slots)


def compare(spec, weights, count, chunk):
    ids = random_ids(graph_of(spec, weights), count)
    ours, _ = make_path(spec, weights, chunk)
    got = logits(ours, ours._kv.add(count), ids)
    oracle = reference(spec, weights)
    want = forward(oracle, oracle.kv.add(count), ids)
    assert got.shape == want.shape and got.isfinite().all()
    assert_close(want, got)


def assert_close(want, got):
    kl = divergence(want, got)
    assert kl.quantile(MOST_ROWS) < MOST_KL and kl.mean() < MEAN_KL, kl


@pytest.mark.parametrize(
    ("weights", "count"), [*(("bf16", n) for n in (1, 12, 13, 14, 40)), ("nvfp4", 14), ("nvfp4", 33)]
)
def test_a_prompt_in_one_chunk(weights, count):
    compare("short-flint", weights, count, CONTEXT)


@pytest.mark.parametrize("chunk", [1, 5, 8, 13, 16])
def test_a_prompt_in_several_chunks(chunk):
    """Chunks shorter than a page, than the window, as long as either, and longer; the last one shorter."""
    compare("short-flint", "bf16", 2 * chunk + max(1, chunk // 2), chunk)


def test_another_spec():
    """No sinks, no shared expert, softmax, three keys for six queries, sizes that are no powers of two."""
    compare("short-other", "bf16", 23, 9)


def test_the_cache_is_what_steps_leave():
    """Full layers hold all positions; rings hold what steps of a few rows would have left."""
    count, ids = 37, random_ids(graph_of("short-flint", "bf16"), 37)
    whole, whole_storage = make_path("short-flint", "bf16", CONTEXT)
    parts, parts_storage = make_path("short-flint", "bf16", 4)
    for path in (whole, parts):
        list(path.chunks(path._kv.add(count), ids))
    for name, tensor in whole_storage.tensors.items():
        other = parts_storage.tensors[name]
        assert torch.equal(tensor.isnan(), other.isnan()), name
        assert (tensor.nan_to_num() - other.nan_to_num()).abs().max() < 0.1, name


def test_a_prompt_is_continued():
    """What a chunk left in the cache is continued by steps of the reference, and by another chunk."""
    spec = "short-flint"
    ids = random_ids(graph_of(spec, "bf16"), 30)
    path, storage = make_path(spec, "bf16", CONTEXT)
    slot = path._kv.add(CONTEXT)
    list(path.chunks(slot, ids[:21]))
    got = logits(path, slot, ids[21:])
    oracle = reference(spec, "bf16")
    want = forward(oracle, oracle.kv.add(CONTEXT), ids)[21:]
    assert_close(want, got)
    stepping = reference(spec, "bf16")
    stepping.kv = path._kv
    stepping._storage = storage
    stepping.rows = 1
    path._kv.cut(slot, 29)
    assert_close(want[-1:], forward(stepping, slot, ids[29:]))


def test_sequences_do_not_see_each_other():
    ids = random_ids(graph_of("short-flint", "bf16"), 20)
    alone, _ = make_path("short-flint", "bf16", CONTEXT)
    want = logits(alone, alone._kv.add(20), ids)
    path, _ = make_path("short-flint", "bf16", CONTEXT)
    other = path._kv.add(30)
    list(path.chunks(other, random_ids(graph_of("short-flint", "bf16"), 17, seed=1)))
    assert torch.equal(logits(path, path._kv.add(20), ids), want)
