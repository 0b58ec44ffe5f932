"""The step in transformers at test size on the CPU: its sizes, its cache, and what the token sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, FlintConfig

from flintc import api
from flintc.bench import transformers_step
from flintc.bench.timing import Timing
from flintc.bench.transformers_step import TransformersStep, counted, filled_cache, make_step, measure_transformers
from flintc.checkpoint.config_json import published_config
from flintc.ir.build import build
from flintc.spec import BoundModel, bind_defaults, load_spec

SHORT, LONG = 5, 40  # below and above the window


def resized(**sizes: int) -> BoundModel:
    return api._resized(load_spec("tiny-flint"), sizes)


TINY = bind_defaults(load_spec("tiny-flint"))


def step_of(tokens: int, model: BoundModel = TINY) -> TransformersStep:
    return make_step(published_config(model), tokens, "cpu")


@pytest.mark.parametrize(
    "model", [TINY, resized(layers=3, hidden=96, vocab=99, heads=6, kv_heads=3, window=7, experts=5, dense_width=40)]
)
def test_the_models_sizes_are_the_specs(model: BoundModel) -> None:
    step, dims = step_of(LONG, model), model.dims
    config = step.model.config
    assert (config.num_hidden_layers, config.sliding_window) == (dims["layers"], dims["window"])
    assert (config.num_experts_per_tok, config.rms_norm_eps) == (dims["experts_per_token"], model.numbers["eps"])
    assert config.rope_parameters["rope_theta"] == model.numbers["rope_theta"]
    full = {n for n, kind in enumerate(config.layer_types) if kind == "full_attention"}
    assert full == model.layer_sets["full"]
    weights = [v.type.shape for v in build(model).values.values() if v.kind == "weight"]
    drawn = sum(p.numel() for p in step.model.parameters())
    assert drawn == sum(torch.Size([d for d in shape if isinstance(d, int)]).numel() for shape in weights)


def test_weights_are_bf16_but_for_those_that_transformers_keeps() -> None:
    dtypes = {name: p.dtype for name, p in step_of(SHORT).model.named_parameters()}
    for name, dtype in dtypes.items():
        kept = name.endswith(("self_attn.sinks", "mlp.gate.weight"))
        assert dtype == (torch.float32 if kept else torch.bfloat16), name
    assert torch.float32 in dtypes.values()


@pytest.mark.parametrize("tokens", [1, SHORT, TINY.dims["window"] - 1, TINY.dims["window"], LONG])
def test_the_cache_is_as_a_prompt_leaves_it(tokens: int) -> None:
    step = step_of(tokens)
    prompted = DynamicCache(config=step.model.config)
    with torch.no_grad():
        step.model.model(input_ids=torch.arange(tokens)[None], cache=prompted, use_cache=True)
    for number, (ours, theirs) in enumerate(zip(step.cache.layers, prompted.layers, strict=True)):
        ours, theirs = as_any(ours), as_any(theirs)
        assert type(ours) is type(theirs)
        assert (ours.keys.shape, ours.values.shape) == (theirs.keys.shape, theirs.values.shape)
        assert ours.keys.dtype == ours.values.dtype == theirs.keys.dtype == torch.bfloat16
        assert ours.get_seq_length() == theirs.get_seq_length() == tokens
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        kept = tokens if number in TINY.layer_sets["full"] else min(tokens, TINY.dims["window"] - 1)
        assert ours.keys.shape == (1, TINY.dims["kv_heads"], kept, TINY.dims["head_dim"])


def as_any(x: object) -> Any:
    return x


def test_keys_and_values_differ_everywhere() -> None:
    cache = filled_cache(FlintConfig.from_dict(published_config(TINY)), LONG, "cpu")
    rows = torch.cat([t.flatten(0, 2) for layer in map(as_any, cache.layers) for t in (layer.keys, layer.values)])
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_step_is_of_the_token_after_the_cached_ones(tokens: int) -> None:
    step = step_of(tokens)
    positions: list[int] = []
    step.model.model.rotary_emb.register_forward_pre_hook(lambda _, args: positions.extend(args[1].flatten().tolist()))
    first = []
    for repeat in (0, 1, 0):
        step.restore(repeat)
        assert {layer.get_seq_length() for layer in map(as_any, step.cache.layers)} == {tokens}
        states = step.run()
        assert states.shape == (1, 1, TINY.dims["hidden"]) and states.dtype == torch.bfloat16
        assert states.isfinite().all()
        assert {layer.get_seq_length() for layer in map(as_any, step.cache.layers)} == {tokens + 1}
        first.append(states)
    assert positions == [tokens] * 3
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0], first[1])


def test_a_run_is_the_model_without_its_head() -> None:
    step = step_of(SHORT)
    step.restore(0)
    states = step.run()
    step.restore(0)
    with torch.no_grad():
        logits = step.model(input_ids=step.ids, cache=step.cache).logits
    assert torch.equal(step.model.lm_head(states), logits)


@pytest.mark.parametrize("layer", range(TINY.dims["layers"]))
def test_attention_sees_every_token_that_is_kept(layer: int) -> None:
    """The weights of attention over the cache and the token itself, none of them zero."""
    step = step_of(LONG)
    seen: list[torch.Tensor] = []
    attention = step.model.model.layers[layer].self_attn
    attention.register_forward_hook(lambda _, args, out: seen.append(out[1]))
    step.run()
    places = LONG + 1 if layer in TINY.layer_sets["full"] else TINY.dims["window"]
    assert seen[0].shape == (1, TINY.dims["heads"], 1, places)
    assert (seen[0] > 0).all()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_dynamo_takes_the_step_once_for_all_repeats() -> None:
    step = step_of(LONG)
    step.restore(0)
    plain = step.run()
    step.compile("eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for repeat in (0, 1, 0):
            step.restore(repeat)
            compiled = step.run()
    assert torch.equal(plain, compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_of_transformers(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the GPU's clock and profiler."""
    made: list[TransformersStep] = []

    def make(published: Mapping[str, Any], tokens: int, device: str) -> TransformersStep:
        assert device == "cuda"
        made.append(make_step(published, tokens, "cpu"))
        # As in a test of its own; the default one needs a C++ compiler here.
        monkeypatch.setattr(made[0], "compile", partial(made[0].compile, "eager"))
        return made[0]

    def timed(run: Callable[[], object], repeats: int, before: Callable[[int], object]) -> Timing:
        for repeat in range(repeats):
            before(repeat)
            run()
        return Timing((1.0, 2.0, 3.0))

    def profiled(run: Callable[[], object]) -> list[Any]:
        run()
        return [event("gemv"), event("Memset (Device)")]

    for name, fake in (("make_step", make), ("time_device", timed), ("device_events", profiled)):
        monkeypatch.setattr(transformers_step, name, fake)
    found = measure_transformers(published_config(TINY), LONG, 3, compiled)
    assert (found.ms, found.launches, found.nbytes) == (2.0, 1, None)
    assert found.how == "attention eager, experts grouped_mm; copies and fills of memory, not counted: 1"
    assert (made[0].forward is made[0].model.model) != compiled
    assert made[0].cache.get_seq_length() == LONG + 1  # the profiled step is of the same length as the timed ones


def event(name: str, mark: bool = False) -> Any:
    return SimpleNamespace(name=name, is_user_annotation=mark)


def test_kernels_are_counted_apart_from_copies_and_marks() -> None:
    events = [
        event("gemv"), event("gemv"), event("Memcpy DtoH (Device -> Pageable)"), event("Memset (Device)"),
        event("Torch-Compiled Region: 0/0", mark=True),
    ]  # fmt: skip
    assert counted(events) == (2, 2)
