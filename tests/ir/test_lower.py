"""Attention as partials and a merge: nothing else changes."""

from pathlib import Path

import pytest

from flintc import api
from flintc.errors import VerificationError
from flintc.ir.build import build
from flintc.ir.graph import Launch
from flintc.ir.lower import lower_attention
from flintc.ir.types import TensorType
from flintc.spec import bind_defaults, load_spec

OTHER = Path(__file__).parents[1] / "data" / "other.yaml"


def built(name):
    return build(bind_defaults(load_spec(name)))


def test_the_two_ops_of_a_full_layer():
    graph = lower_attention(built("tiny-flint"), 16, partials=5)
    partial, merge = graph.ops["L1.attention"], graph.ops["L1.attention_merge"]
    assert partial.kind == "attention_partial" and merge.kind == "attention_merge"
    assert partial.inputs == ("L1.q", "L1.cache.1", "positions", "seqs", "block_table")
    assert partial.outputs == ("L1.a.o", "L1.a.m", "L1.a.l")
    assert merge.inputs == (*partial.outputs, "positions", "seqs", "L1.w.sinks") and merge.outputs == ("L1.a",)
    assert dict(partial.attrs) == {"scale": pytest.approx(32**-0.5), "window": None, "chunk": 16, "partials": 5}
    assert dict(merge.attrs) == {"chunk": 16, "window": None, "partials": 5}
    assert graph.values["L1.a.o"].type == TensorType("f32", ("B", 4, 5, 32))
    assert graph.values["L1.a.m"].type == graph.values["L1.a.l"].type == TensorType("f32", ("B", 4, 5))
    assert graph.values["L1.a.o"].layer == 1


def test_a_windowed_layer_has_a_fixed_number_of_splits():
    graph = lower_attention(built("tiny-flint"), 16)
    for op in (graph.ops["L2.attention"], graph.ops["L2.attention_merge"]):
        assert (op.attrs["window"], op.attrs["partials"]) == (13, None)
    assert graph.values["L2.a.o"].type == TensorType("f32", ("B", 4, 2, 32))


def test_without_sinks():
    graph = lower_attention(built(OTHER), 8)
    assert graph.ops["L1.attention_merge"].inputs == ("L1.seen.o", "L1.seen.m", "L1.seen.l", "positions", "seqs")


@pytest.mark.parametrize("name", ["flint", OTHER])
def test_everything_else_stays(name):
    before = built(name)
    after = lower_attention(before, 64)
    kept = {n: op for n, op in before.ops.items() if op.kind != "attention"}
    assert {n: after.ops[n] for n in kept} == kept
    assert {n: after.values[n] for n in before.values} == dict(before.values)
    assert (after.outputs, after.head, after.name) == (before.outputs, before.head, before.name)
    assert not any(op.kind == "attention" for op in after.ops.values())
    assert list(after.ops) == [name for launch in after.launches for name in launch.ops]
    tiles = {x.name: x.tile for x in before.launches}
    assert all(x.tile == tiles[x.name] for x in after.launches if x.name in tiles)


def test_the_roles_of_the_launches_are_the_kinds_of_their_ops():
    graph = lower_attention(built("tiny-flint"), 16)
    assert all((x.role, x.name) == (graph.ops[x.ops[0]].kind, x.ops[0]) for x in graph.launches)


def test_lowering_twice_changes_nothing():
    once = lower_attention(built("tiny-flint"), 16)
    assert lower_attention(once, 16) == once


def test_a_fused_graph_is_refused():
    graph = built("tiny-flint")
    first, second, *rest = graph.launches
    fused = graph.with_launches((Launch("both", "both", first.ops + second.ops), *rest))
    with pytest.raises(VerificationError, match="both is fused already"):
        lower_attention(fused, 16)


def test_windowed_layers_have_chunks_of_their_own():
    graph = lower_attention(built("tiny-flint"), 16, 4)
    kinds = ("attention_partial", "attention_merge")
    chunks = {(op.attrs["window"], op.attrs["chunk"]) for op in graph.ops.values() if op.kind in kinds}
    assert chunks == {(None, 16), (13, 4)}
    assert graph.values["L2.a.o"].type == TensorType("f32", ("B", 4, 4, 32))
    assert graph.values["L1.a.o"].type == TensorType("f32", ("B", 4, 66, 32))


def test_a_model_is_lowered_as_its_spec_says():
    """Layers over the whole context by its chunk and partials, those with a window by their own chunk."""
    for name, whole, windowed in (("flint", (128, 66), 64), ("tiny-flint", (16, 3), 16), (OTHER, (8, 66), 8)):
        graph = api.run_passes(bind_defaults(load_spec(name)), stop_after="baseline").graph
        cut = {
            (op.attrs["window"] is None, op.attrs["chunk"], op.attrs["partials"])
            for op in graph.ops.values()
            if op.kind in ("attention_partial", "attention_merge")
        }
        assert cut == {(True, *whole), (False, windowed, None)}
