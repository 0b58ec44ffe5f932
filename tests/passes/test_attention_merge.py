"""Pass 3 on planted graphs: what it must take, and what only looks like it."""

import pytest
from graphs import Sketch, crossings, partition

from flintc.ir.ops import OpTypeError
from flintc.passes import run_pipeline


def sketch(*, merge_chunk=16, merge_window=None, merge_partials=3, merge_positions="positions", sinks=True):
    s = Sketch()
    s.given("q", "bf16", "B", 4, 16)
    for name in ("positions", "later", "seqs"):
        s.given(name, "i32", "B")
    s.given("table", "i32", "Q", "T")
    s.given("cache", "bf16", "P", 2, 2, 8, 16, kind="cache")
    s.weight("sinks", "f32", 4)
    read = ["q", "cache", "positions", "seqs", "table"]
    s.op("partial", "attention_partial", read, "o m l", scale=0.25, chunk=16, partials=3)
    last = ["sinks"] if sinks else []
    merged = ["o", "m", "l", merge_positions, "seqs", *last]
    s.op("merge", "attention_merge", merged, "a", chunk=merge_chunk, window=merge_window, partials=merge_partials)
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
        ({"merge_chunk": 32}, "not so: attention_partial and attention_merge agree on chunk, window, partials"),
        # A window of 20 has three splits as well.
        (
            {"merge_window": 20, "merge_partials": None},
            "not so: attention_partial and attention_merge agree on chunk, window, partials",
        ),
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
    s.op("second", "attention_merge", ["o", "m", "l", "positions", "seqs"], "b", chunk=16, partials=3)
    graph = s.graph("a", "b")
    assert run(graph).graph.launches == graph.launches


def test_refuses_statistics_of_another_attention():
    """Other axis: o of one attention merged with m and l of the other."""
    s = sketch()
    read = ["q", "cache", "positions", "seqs", "table"]
    s.op("twin", "attention_partial", read, "o2 m2 l2", scale=0.5, chunk=16, partials=3)
    s.op("mixed", "attention_merge", ["o2", "m", "l2", "positions", "seqs"], "b", chunk=16, partials=3)
    graph = s.graph("a", "b")
    assert run(graph).graph.launches == graph.launches


def test_partials_of_another_dtype_are_no_graph():
    """Rounded partials need no refusal by the rule: no merge reads them."""
    s = sketch()
    s.given("rounded", "bf16", "B", 4, 3, 16)
    with pytest.raises(OpTypeError, match="expected f32"):
        s.op("bad", "attention_merge", ["rounded", "m", "l", "positions", "seqs"], "b", chunk=16, partials=3)


@pytest.mark.parametrize("change", [{"merge_partials": 4}, {"merge_window": 40, "merge_partials": None}])
def test_another_number_of_partials_is_no_graph(change):
    """Nor need the rule refuse a merge that would look for more partials than there are, or for fewer."""
    with pytest.raises(OpTypeError, match=r"its chunk, window and partials make 4 splits"):
        sketch(**change)
