"""Binding to config.json and GGUF metadata, against transformers' own FlintConfig and the published key list."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import FlintConfig

from flintc.errors import CheckpointError
from flintc.spec import bind_config, bind_defaults, bind_gguf, load_spec
from flintc.spec.bind import shortest_fp32

FLINT = load_spec("flint")

#: Dimension of the spec -> attribute of transformers' configuration.
ATTRIBUTES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "sliding_window",
    "dense_width": "intermediate_size",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
}


def tiny_config() -> FlintConfig:
    return FlintConfig(
        num_hidden_layers=5,
        hidden_size=64,
        vocab_size=100,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=7,
        intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )


def saved(config: FlintConfig, folder) -> dict:
    config.architectures = ["FlintForCausalLM"]
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def check_against(model, config: FlintConfig) -> None:
    for name, attribute in ATTRIBUTES.items():
        assert model.dims[name] == getattr(config, attribute), name
    full = {i for i, kind in enumerate(config.layer_types) if kind == "full_attention"}
    assert model.layer_sets["full"] == model.layer_sets["unrotated"] == full
    assert model.layer_sets["dense"] == set(config.mlp_only_layers)
    assert model.numbers["eps"] == config.rms_norm_eps
    assert model.numbers["rope_theta"] == config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("make", [FlintConfig, tiny_config])
def test_what_transformers_saves_binds(make, tmp_path):
    config = make()
    check_against(bind_config(FLINT, config.to_dict(), "config.json"), config)
    check_against(bind_config(FLINT, saved(config, tmp_path), "config.json"), config)


def test_the_published_sizes_are_the_defaults():
    bound, default = bind_config(FLINT, FlintConfig().to_dict(), "config.json"), bind_defaults(FLINT)
    assert (bound.dims, bound.numbers, bound.layer_sets) == (default.dims, default.numbers, default.layer_sets)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_legal_configuration_binds(data):
    layers = data.draw(st.integers(1, 8))
    kinds = st.sampled_from(["full_attention", "sliding_attention"])
    heads = data.draw(st.integers(1, 4))
    config = FlintConfig(
        num_hidden_layers=layers,
        layer_types=data.draw(st.lists(kinds, min_size=layers, max_size=layers)),
        mlp_only_layers=data.draw(st.lists(st.integers(0, layers - 1), unique=True)),
        num_attention_heads=heads * data.draw(st.integers(1, 4)),
        num_key_value_heads=heads,
        sliding_window=data.draw(st.integers(1, 600)),
        rms_norm_eps=data.draw(st.floats(1e-8, 1e-3)),
    )
    check_against(bind_config(FLINT, config.to_dict(), "config.json"), config)


def test_keys_that_nothing_reads_are_told():
    model = bind_config(FLINT, {**FlintConfig().to_dict(), "novelty": 3}, "config.json")
    assert "novelty" in model.ignored
    assert not {"hidden_size", "layer_types", "rope_parameters"} & set(model.ignored)


def published(**changes) -> dict:
    """A config.json in the published form; a value of ``...`` takes the key out."""
    config = {
        **tiny_config().to_dict(),
        "architectures": ["FlintForCausalLM"],
        "use_sliding_window": True,
        "router_score_function": "sigmoid",
        "no_rope_layer_indices": [0, 1, 4],
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def test_the_published_form_binds():
    model = bind_config(FLINT, published(), "config.json")
    assert model.layer_sets["unrotated"] == {0, 1, 4}


def test_no_dense_layers_is_a_value():
    assert bind_config(FLINT, published(mlp_only_layers=[]), "c").layer_sets["dense"] == frozenset()


def test_no_sliding_layers():
    config = published(layer_types=["full_attention"] * 5, no_rope_layer_indices=[0, 1, 2, 3, 4])
    assert bind_config(FLINT, config, "c").layer_sets["full"] == set(range(5))


def test_rope_theta_is_taken_from_either_place_or_its_default():
    assert bind_config(FLINT, published(), "c").numbers["rope_theta"] == 5e5
    old = published(rope_parameters=..., rope_theta=7e5)
    assert bind_config(FLINT, old, "c").numbers["rope_theta"] == 7e5
    assert bind_config(FLINT, published(rope_parameters=...), "c").numbers["rope_theta"] == 10_000
    both = published(rope_theta=5e5)
    assert bind_config(FLINT, both, "c").numbers["rope_theta"] == 5e5


REFUSED = [
    # A contradiction, or a key without which loaders guess.
    ({"no_rope_layer_indices": [0, 1]}, "layer 4 is full but not unrotated: layer_types and no_rope_layer_indices"),
    ({"no_rope_layer_indices": [0, 1, 3, 4]}, "layer 3 is unrotated but not full"),
    ({"no_rope_layer_indices": []}, "contradict each other"),
    ({"layer_types": ...}, "layer_types is absent"),
    ({"layer_types": None}, "layer_types is absent"),
    ({"mlp_only_layers": ...}, "mlp_only_layers is absent"),
    ({"mlp_only_layers": None}, "mlp_only_layers is absent"),
    ({"rope_theta": 1e4}, "rope_parameters.rope_theta is 500000.0, rope_theta is 10000.0: they contradict each other"),
    ({"hidden_size": ...}, "hidden_size is absent (add it: it gives 'hidden' of the model)"),
    ({"head_dim": ...}, "head_dim is absent"),
    ({"head_dim": None}, "head_dim is absent"),
    ({"vocab_size": ...}, "vocab_size is absent"),
    ({"num_hidden_layers": ...}, "num_hidden_layers is absent"),
    ({"sliding_window": None}, "sliding_window is absent"),
    ({"rms_norm_eps": ...}, "rms_norm_eps is absent"),
    # What is not supported, by name.
    ({"use_sliding_window": False}, "use_sliding_window is False; only True"),
    ({"attention_bias": True}, "attention_bias is True; only False"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False; only True"),
    ({"router_score_function": "softmax"}, "router_score_function is 'softmax'; only 'sigmoid'"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True; only False"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters.rope_type is 'yarn'"),
    ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "rope_parameters.factor is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention is not supported"),
    ({"rope_parameters": [1]}, "rope_parameters is [1], expected a mapping"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM']"),
    # Malformed values.
    ({"hidden_size": "64"}, "hidden_size is '64', expected a positive whole number"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0, expected a positive whole number"),
    ({"hidden_size": True}, "hidden_size is True, expected a positive whole number"),
    ({"sliding_window": -7}, "sliding_window is -7, expected a positive whole number"),
    ({"sliding_window": 0}, "sliding_window is 0"),
    ({"num_hidden_layers": 10**9}, "1000000000 layers"),
    ({"hidden_size": 10**400}, "hidden_size is 1000"),
    ({"sliding_window": 2**31}, "sliding_window is 2147483648, expected a positive whole number, at most 2147483647"),
    ({"rms_norm_eps": 10**400}, "..., expected a positive number, at most 1.7976931348623157e+308"),
    ({"rope_parameters": {"rope_theta": 10**400}}, "rope_parameters.rope_theta is 1000"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries for 5 layers"),
    ({"layer_types": ["full_attention"] * 4 + ["chunked_attention"]}, "layer_types holds 'chunked_attention'"),
    ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
    ({"mlp_only_layers": [5]}, "mlp_only_layers[0] is 5, expected a layer number below 5"),
    ({"mlp_only_layers": [-1]}, "mlp_only_layers[0] is -1"),
    ({"mlp_only_layers": [True]}, "mlp_only_layers[0] is True"),
    ({"mlp_only_layers": 2}, "mlp_only_layers is 2, expected a list"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_configurations_that_are_refused(changes, said):
    with pytest.raises(CheckpointError) as caught:
        bind_config(FLINT, published(**changes), "some/config.json")
    assert str(caught.value).startswith("some/config.json: ") and said in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def gguf(**changes) -> dict:
    """Metadata as published; ``__`` in a keyword stands for a dot, ``...`` takes the key out."""
    pattern = [i not in {0, 1, *range(5, 46, 4), 48} for i in range(49)]
    keys = {
        "block_count": 49,
        "context_length": 262_144,
        "embedding_length": 2048,
        "feed_forward_length": 6144,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 513,
        "attention.sliding_window_pattern": pattern,
        "rope_pattern": pattern,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": 128,
        "leading_dense_block_count": 2,
        "expert_count": 256,
        "expert_used_count": 6,
        "expert_feed_forward_length": 512,
        "expert_shared_feed_forward_length": 1024,
        "expert_shared_count": 2,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "vocab_size": 150_144,
    }
    metadata = {"general.architecture": "flint", **{f"flint.{key}": value for key, value in keys.items()}}
    for name, value in changes.items():
        key = name.replace("__", ".")
        metadata[key if key.startswith("general.") else f"flint.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not ...}


def test_the_published_gguf_is_the_same_model():
    bound, default = bind_gguf(FLINT, gguf(), "m.gguf"), bind_defaults(FLINT)
    assert (bound.dims, bound.numbers, bound.layer_sets) == (default.dims, default.numbers, default.layer_sets)
    assert bound.ignored == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": ...},
        {"rope__freq_base": ...},
        {"rope_pattern": ...},
        {"expert_weights_scale": 1.0},
        {"general__tensor_extra__prec_a4": [False] * 4},
        {"rope__scaling__type": "none"},
    ],
)
def test_what_a_gguf_may_leave_out_or_add(changes):
    assert bind_gguf(FLINT, gguf(**changes), "m.gguf").dims == bind_defaults(FLINT).dims


def test_keys_of_a_gguf_that_nothing_reads_are_told():
    assert bind_gguf(FLINT, gguf(novelty=1), "m.gguf").ignored == ("flint.novelty",)


GGUF_REFUSED = [
    ({"general__architecture": "llama"}, "general.architecture is 'llama', spec 'flint' describes 'flint'"),
    ({"general__architecture": ...}, "general.architecture is absent"),
    ({"block_count": ...}, "flint.block_count is absent"),
    ({"attention__sliding_window_pattern": ...}, "flint.attention.sliding_window_pattern is absent"),
    ({"attention__sliding_window_pattern": 4}, "flint.attention.sliding_window_pattern is 4, expected a list"),
    ({"attention__sliding_window_pattern": [True] * 48}, "has 48 entries for 49 layers"),
    ({"attention__sliding_window_pattern": [1] * 49}, "[0] is 1, expected true or false"),
    ({"rope_pattern": [True] * 49}, "layer 0 is full but not unrotated: flint.attention.sliding_window_pattern and"),
    ({"leading_dense_block_count": 50}, "flint.leading_dense_block_count is 50, expected a count of at most 49"),
    ({"leading_dense_block_count": -1}, "expected a count"),
    ({"leading_dense_block_count": ...}, "flint.leading_dense_block_count is absent"),
    ({"attention__value_length": 64}, "flint.attention.value_length is 64, which contradicts head_dim = 128"),
    ({"rope__dimension_count": 64}, "flint.rope.dimension_count is 64, which contradicts head_dim = 128"),
    ({"expert_shared_count": 1}, "flint.expert_shared_count is 1, which contradicts shared_width / expert_width = 2"),
    ({"expert_shared_feed_forward_length": 1000}, "shared_width / expert_width is not a whole number"),
    ({"expert_gating_func": 1}, "flint.expert_gating_func is 1; only 2"),
    ({"expert_weights_norm": False}, "flint.expert_weights_norm is False; only True"),
    ({"expert_weights_norm": 1}, "flint.expert_weights_norm is 1; only True"),
    ({"expert_weights_scale": 2.5}, "flint.expert_weights_scale is 2.5; only 1.0"),
    ({"rope__scaling__type": "yarn"}, "flint.rope.scaling.type is 'yarn'"),
    ({"general__tensor_extra__prec_a4": [False, True]}, "general.tensor_extra.prec_a4 holds True; only False"),
]


@pytest.mark.parametrize(("changes", "said"), GGUF_REFUSED, ids=[said for _, said in GGUF_REFUSED])
def test_metadata_that_is_refused(changes, said):
    with pytest.raises(CheckpointError) as caught:
        bind_gguf(FLINT, gguf(**changes), "m.gguf")
    assert str(caught.value).startswith("m.gguf: ") and said in str(caught.value)


OTHER = load_spec(Path(__file__).parents[1] / "data" / "other.yaml")
OTHER_CONFIG = {
    "depth": 2,
    "width": 96,
    "tokens": 9,
    "context": 9,
    "queries": 2,
    "keys": 1,
    "reach": 4,
    "pool": 4,
    "picks": 1,
    "breadth": 16,
    "theta": 300,
    "near": [True, False],
}


def test_a_spec_of_other_names_binds():
    model = bind_config(OTHER, OTHER_CONFIG, "c")
    assert model.layer_sets["near"] == {0} and model.dims["head"] == 16
    assert model.numbers["rope_theta"] == 300 and model.dims["queries"] == 2


def test_a_dimension_that_the_spec_fixes_must_match():
    assert bind_config(OTHER, {**OTHER_CONFIG, "head": 16}, "c").dims["head"] == 16
    with pytest.raises(CheckpointError, match="c: head is 32, spec 'other' has head = 16"):
        bind_config(OTHER, {**OTHER_CONFIG, "head": 32}, "c")


def test_sizes_that_do_not_fit_the_spec_are_the_checkpoints_fault(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        (Path(__file__).parents[1] / "data" / "other.yaml")
        .read_text()
        .replace("queries: {", "group: queries / keys\n  queries: {")
    )
    with pytest.raises(CheckpointError, match=r"c: its sizes do not fit spec 'other': .* 2 does not divide 3"):
        bind_config(load_spec(path), {**OTHER_CONFIG, "queries": 3, "keys": 2}, "c")


@pytest.mark.parametrize(
    ("stored", "meant"),
    [(9.999999974752427e-07, 1e-06), (10000.0, 10000.0), (0.10000000149011612, 0.1), (0.1, 0.1), (1e300, 1e300)],
)
def test_a_gguf_number_is_the_decimal_that_was_written(stored: float, meant: float) -> None:
    assert shortest_fp32(stored) == meant


def test_an_epsilon_stored_in_fp32_is_that_of_the_spec() -> None:
    (stored,) = struct.unpack("f", struct.pack("f", 1e-6))
    bound = bind_gguf(FLINT, gguf(**{"attention.layer_norm_rms_epsilon": stored}), "m.gguf")
    assert bound.numbers["eps"] == bind_defaults(FLINT).numbers["eps"]
