"""The unfused graph against the published description of Flint, and against brute force where a size is derived."""

import time
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintc.errors import SpecError
from flintc.ir.build import RING_ROWS, build, ring_pages
from flintc.ir.lower import lower_attention
from flintc.ir.ops import OPS, infer
from flintc.ir.types import TensorType, resolve
from flintc.spec import bind_config, bind_defaults, load_spec

OTHER = Path(__file__).parents[1] / "data" / "other.yaml"
FULL = {0, 1, *range(5, 46, 4), 48}


def model_of(name):
    return bind_defaults(load_spec(name))


def baseline(name, weights="bf16"):
    model = model_of(name)
    numerics = model.spec.numerics
    cut = numerics.attention_chunk, numerics.window_chunk, numerics.attention_partials
    return lower_attention(build(model, weights), *cut)


@pytest.fixture(scope="module")
def flint():
    return build(model_of("flint"))


@pytest.fixture(scope="module")
def flint_baseline():
    return baseline("flint")


def labels(graph, layer):
    return [graph.ops[name].label for launch in graph.layer_launches(layer) for name in launch.ops]


def test_a_sliding_moe_layer_op_by_op(flint_baseline):
    assert labels(flint_baseline, 2) == [
        "add", "norm", "qkv", "q_norm", "k_norm", "rope", "kv_write", "attention", "attention_merge", "o_proj",
        "mlp_add", "mlp_norm", "router", "topk", "expert_gate_up", "expert_silu", "expert_down", "combine",
        "shared_gate_up", "shared_silu", "shared_down", "shared_add",
    ]  # fmt: skip


def test_launches_per_layer_kind(flint_baseline):
    counts = {layer: len(flint_baseline.layer_launches(layer)) for layer in flint_baseline.layers()}
    assert counts == {0: 13, 1: 14} | {n: 21 if n in FULL else 22 for n in range(2, 49)}


def test_launches_of_the_step_and_of_the_head(flint_baseline):
    assert len(flint_baseline.body) == 1052
    assert [x.ops for x in flint_baseline.launches if x not in flint_baseline.body] == [("head",)]
    assert [x.name for x in flint_baseline.layer_launches(None)] == ["embed", "final_add", "final_norm", "head"]


def test_parameters_are_as_published(flint):
    """Every published parameter is a weight of the graph, and none besides."""
    sizes = {v.name: prod(v.type.shape) for v in flint.values.values() if v.kind == "weight"}
    assert sum(sizes.values()) == 39_785_287_456
    experts = sum(size for name, size in sizes.items() if name.endswith(("expert_gate_up", "expert_down")))
    # The published count of active parameters leaves out the embedding, and the vectors: norms and sinks.
    vectors = sum(prod(v.type.shape) for v in flint.values.values() if v.kind == "weight" and len(v.type.shape) == 1)
    active = sum(sizes.values()) - sizes["w.embed"] - vectors - experts + experts * 6 // 256
    assert active == 2_515_271_680


def test_rope_is_on_the_sliding_layers_alone(flint):
    assert {op.layer for op in flint.ops.values() if op.kind == "rope"} == set(range(49)) - FULL


def test_every_layer_has_sinks(flint):
    attention = [op for op in flint.ops.values() if op.kind == "attention"]
    assert len(attention) == 49
    assert all(op.inputs[-1] == f"L{op.layer}.w.sinks" for op in attention)


def test_windows(flint):
    for op in flint.ops.values():
        if op.kind in ("attention", "kv_write"):
            assert op.attrs["window"] == (None if op.layer in FULL else 513)


@pytest.mark.parametrize("name", ["flint", "tiny-flint", OTHER])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_a_graph_is_single_assignment_in_order_and_typed(name, weights):
    graph = baseline(name, weights)
    made = {v for v, value in graph.values.items() if value.kind in ("input", "weight", "table")}
    made |= {op.inputs[2] for op in graph.ops.values() if op.kind == "kv_write"}
    for launch in graph.launches:
        (op_name,) = launch.ops
        op = graph.ops[op_name]
        assert set(op.inputs) <= made
        assert not made & set(op.outputs)
        made |= set(op.outputs)
        types = infer(op.kind, tuple(graph.values[v].type for v in op.inputs), op.attrs)
        assert types == tuple(graph.values[v].type for v in op.outputs)
        assert set(op.attrs) == set(OPS[op.kind].attrs)
    assert made == set(graph.values)
    assert set(graph.ops) == {name for launch in graph.launches for name in launch.ops}


def test_values_are_named_after_their_layer(flint):
    for name, value in flint.values.items():
        assert name.startswith(f"L{value.layer}.") if value.layer is not None else "L" not in name
    assert flint.ops["L2.rope"].outputs == ("L2.q.1", "L2.k.1")
    assert flint.ops["L2.norm"].inputs == ("L2.sum", "L2.w.input_norm")


def test_caches_and_block_tables(flint):
    full, ring = flint.ops["L1.kv_write"], flint.ops["L2.kv_write"]
    assert full.inputs[2:] == ("L1.cache", "positions", "seqs", "block_table") and full.outputs == ("L1.cache.1",)
    assert ring.inputs[2:] == ("L2.cache", "positions", "seqs", "block_table.w513")
    assert flint.values["L1.cache"].type == TensorType("bf16", ("P", 2, 4, 64, 128))
    assert flint.values["L2.cache.1"].type == TensorType("bf16", ("9*Q", 2, 4, 64, 128))
    assert flint.values["block_table"].type == TensorType("i32", ("Q", "T"))
    assert flint.values["block_table.w513"].type == TensorType("i32", ("Q", 9))
    assert flint.values["rope_table"].type == TensorType("f32", ("C", 2, 64))
    assert all(flint.values[f"L{n}.cache{suffix}"].kind == "cache" for n in range(49) for suffix in ("", ".1"))


def test_outputs_are_the_logits_and_the_written_caches(flint):
    assert flint.outputs == ("logits", *(f"L{n}.cache.1" for n in range(49)))
    assert flint.values["logits"].type == TensorType("f32", ("B", 150_144))


def test_windowed_layers_hold_the_published_bytes(flint):
    """36.8 MB for all 35 windows of 513 tokens; the ring rounds up to whole pages and one step of rows."""
    rings = [flint.values[f"L{n}.cache"].type for n in range(49) if n not in FULL]
    held = sum(t.nbytes({"Q": 1}) for t in rings)
    assert 36.8e6 < held < 36.8e6 * 1.13


@given(window=st.integers(1, 600), page=st.sampled_from([1, 4, 8, 64]))
def test_a_ring_loses_no_window_of_a_full_step(window, page):
    """Rows p..p+7 of one sequence are all written before row p reads the window behind it."""
    slots = ring_pages(window, page) * page
    for first in (window, window + page - 1, 5 * window + 3):
        alive = range(max(0, first - window + 1), first + RING_ROWS)
        assert len({p % slots for p in alive}) == len(alive)
    if slots > page:  # and not a page more than that needs
        assert window - 1 + RING_ROWS > slots - page


@settings(deadline=None)
@given(window=st.integers(1, 60), chunk=st.integers(1, 20))
def test_splits_under_a_window_are_as_many_as_some_row_needs(window, chunk):
    def needed(position):
        first = max(0, position - window + 1) // chunk
        return position // chunk - first + 1

    cache = TensorType("bf16", ("P", 2, 1, 8, 16))
    i32 = TensorType("i32", ("B",))
    types = (TensorType("bf16", ("B", 1, 16)), cache, i32, i32, TensorType("i32", ("Q", "T")))
    o, _, _ = infer("attention_partial", types, {"scale": 1.0, "window": window, "chunk": chunk, "partials": None})
    assert o.shape[2] == max(needed(p) for p in range(3 * (window + chunk)))


def test_nvfp4_changes_the_linear_weights_alone(flint):
    model = model_of("flint")
    packed = build(model, "nvfp4")
    assert packed.ops == flint.ops
    for name, value in packed.values.items():
        linear = value.kind == "weight" and model.spec.weights[value.source].type == "linear"
        assert value.type.dtype == ("nvfp4" if linear else flint.values[name].type.dtype)
    assert packed.values["w.embed"].type.dtype == "bf16"
    assert packed.values["L2.w.router"].type.dtype == "f32"


def test_nvfp4_needs_whole_blocks(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(OTHER.read_text().replace("breadth: {default: 80,", "breadth: {default: 72,"))
    model = bind_defaults(load_spec(path))
    build(model)
    with pytest.raises(SpecError, match="72 columns are not a multiple of 16"):
        build(model, "nvfp4")


def test_no_full_size_gemv_has_a_grid_under_64(flint_baseline):
    gemvs = 0
    for launch in flint_baseline.launches:
        op = flint_baseline.ops[launch.ops[0]]
        if op.kind not in ("linear", "expert_linear", "router"):
            assert launch.tile is None
            continue
        gemvs += 1
        out = flint_baseline.values[op.outputs[0]].type
        per_row = prod(resolve(d, {}) for d in out.shape[1:])
        assert launch.tile and per_row // launch.tile >= 64
    assert gemvs == 49 * 2 + 2 * 2 + 47 * 5 + 1


def test_a_spec_of_other_names_and_shape():
    graph = baseline(OTHER)
    kinds = [op.kind for op in graph.ops.values()]
    assert kinds.count("rope") == 4 and kinds.count("sum") == 0 and "w.sinks" not in str(graph.values)
    assert {op.layer for op in graph.ops.values() if op.attrs.get("window")} == {0, 2}
    topk = graph.ops["L0.topk"]
    assert (topk.attrs["score"], topk.attrs["renormalize"], topk.attrs["k"]) == ("softmax", False, 2)
    assert [len(graph.layer_launches(n)) for n in range(4)] == [17, 18, 18, 18]
    assert graph.outputs[0] == "scores" and graph.head == {"speak"}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_launch_counts_of_any_mix_of_layers(data):
    """Counted from what each layer is, not from the graph."""
    layers = data.draw(st.integers(1, 9))
    full = data.draw(st.sets(st.integers(0, layers - 1)))
    dense = data.draw(st.sets(st.integers(0, layers - 1)))
    config = {
        "num_hidden_layers": layers, "hidden_size": 32, "vocab_size": 64, "max_position_embeddings": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5,
        "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "rms_norm_eps": 1e-6, "mlp_only_layers": sorted(dense),
        "layer_types": ["full_attention" if n in full else "sliding_attention" for n in range(layers)],
    }  # fmt: skip
    graph = lower_attention(build(bind_config(load_spec("flint"), config, "c")), 8)
    for n in range(layers):
        residual_add = 1 if n > 0 else 0
        rotation = 0 if n in full else 1
        mlp = 3 if n in dense else 10
        assert len(graph.layer_launches(n)) == residual_add + rotation + 10 + mlp


def test_building_is_quick():
    """Half a second for all of Flint, on a machine that may be busy: best of three."""
    model, spent = model_of("flint"), []
    for _ in range(3):
        start = time.perf_counter()
        lower_attention(build(model), 512)
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.5
