"""Pass 3 on planted graphs: what it must take, and what only looks like it."""

import pytest
from graphs import Sketch, crossings, partition

from flintc.ir.ops import OpTypeError
from flintc.passes import run_pipeline


def sketch(*, chunk=16, merge_chunk=16, merge_window=None, merge_positions="positions", sinks=True):
    s = Sketch()
    s.given("q", "bf16", "B", 4, 16)
    for name in ("positions", "later", "seqs"):
        s.given(name, "i32", "B")
    s.given("table", "i32", "Q", "T")
    s.given("cache", "bf16", "P", 2, 2, 8, 16, kind="cache")
    s.weight("sinks", "f32", 4)
    s.op("partial", "attention_partial", ["q", "cache", "positions", "seqs", "table"], "o m l", scale=0.25, chunk=chunk)
    last = ["sinks"] if sinks else []
    merged = ["o", "m", "l", merge_positions, "seqs", *last]
    s.op("merge", "attention_merge", merged, "a", chunk=merge_chunk, window=merge_window)
    return s


def run(graph):
    return run_pipeline(graph, ["attention-merge"])


@pytest.mark.parametrize("sinks", [True, False])
def test_takes_the_partials_and_their_merge(sinks):
    got = run(sketch(sinks=sinks).graph("a")).graph
    assert partition(got) == "attention(partial merge)"
    assert crossings(got, "attention") == dict.fromkeys("oml", "last-arriver:row-head")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"merge_chunk": 32}, "not so: attention_partial and attention_merge agree on chunk, window"),
        ({"merge_window": 20}, "not so: attention_partial and attention_merge agree on chunk, window"),
        ({"merge_positions": "later"}, None),
    ],
    ids=["other chunk", "other window", "other positions"],
)
def test_refuses(change, refusal):
    graph = sketch(**change).graph("a")
    got = run(graph)
    assert got.graph.launches == graph.launches
    assert list(got.steps[1].matches[0].refused) == ([refusal] if refusal else [])


def test_refuses_a_second_consumer_of_the_partials():
    s = sketch()
    s.op("second", "attention_merge", ["o", "m", "l", "positions", "seqs"], "b", chunk=16)
    graph = s.graph("a", "b")
    assert run(graph).graph.launches == graph.launches


def test_refuses_statistics_of_another_attention():
    """Other axis: o of one attention merged with m and l of the other."""
    s = sketch()
    s.op("twin", "attention_partial", ["q", "cache", "positions", "seqs", "table"], "o2 m2 l2", scale=0.5, chunk=16)
    s.op("mixed", "attention_merge", ["o2", "m", "l2", "positions", "seqs"], "b", chunk=16)
    graph = s.graph("a", "b")
    assert run(graph).graph.launches == graph.launches


def test_partials_of_another_dtype_are_no_graph():
    """Rounded partials need no refusal by the rule: no merge reads them."""
    s = sketch()
    s.given("rounded", "bf16", "B", 4, "S", 16)
    with pytest.raises(OpTypeError, match="expected f32"):
        s.op("bad", "attention_merge", ["rounded", "m", "l", "positions", "seqs"], "b", chunk=16)
