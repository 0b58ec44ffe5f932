"""What `flintc bench limits` measures, without a GPU: which launches and lengths, and what it says of figures."""

from __future__ import annotations

import pytest
from graphs import OTHER, pipeline

from flintc.bench.limits import layers_with_experts, lengths, long_attention, measure_limits
from flintc.errors import BackendError, UsageError


def test_the_long_attention_is_that_of_a_layer_that_sees_everything() -> None:
    graph = pipeline("flint").graph
    assert long_attention(graph).name == "L0.attention"
    windows = {graph.ops[o].attrs["window"] for o in long_attention(graph).ops if "window" in graph.ops[o].attrs}
    assert windows == {None}


def test_layers_with_experts() -> None:
    assert layers_with_experts(pipeline("flint").graph) == list(range(2, 49))
    assert layers_with_experts(pipeline(OTHER).graph)


def test_lengths_end_at_the_context_and_are_told_once() -> None:
    assert lengths(100_000) == (1, 500, 4000, 12_500, 25_000, 50_000, 75_000, 100_000)
    assert lengths(3) == (1, 2, 3)
    assert lengths(1) == (1,)


def test_a_model_without_either_is_refused() -> None:
    graph = pipeline("flint").graph
    without = graph.with_launches(tuple(x for x in graph.launches if x.role == "add_norm"))
    with pytest.raises(UsageError, match="no layer of flint sees everything"):
        long_attention(without)
    with pytest.raises(UsageError, match="no layer of flint has experts"):
        layers_with_experts(without)


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    with pytest.raises(BackendError, match="needs a GPU"):
        measure_limits("tiny-flint", "bf16", None, 512)
