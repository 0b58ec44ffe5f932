"""One decode step of transformers' Flint with random weights, on a cache that is filled without a prompt.

A step is what :class:`flintc.bench.forward.ForwardBench` calls the body: embedding, all layers and the final norm of
one token, without the head. Needs transformers 5.24 (``pip install 'flintc[verify]'``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, FlintConfig, FlintForCausalLM

from flintc.bench.timing import StepFigures, device_events, time_device

#: Classes of transformers that this module runs, as a config.json names them.
ARCHITECTURES = frozenset({FlintForCausalLM.__name__})
_DTYPE = torch.bfloat16


def random_model(config: FlintConfig, device: str, seed: int = 0) -> FlintForCausalLM:
    """A model of ``config`` in BF16, its weights drawn on ``device``; transformers keeps router and sinks in FP32."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: FlintForCausalLM = FlintForCausalLM._from_config(config, dtype=_DTYPE)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def filled_cache(config: FlintConfig, tokens: int, device: str, seed: int = 0) -> DynamicCache:
    """The cache that a prompt of ``tokens`` leaves, with random keys and values.

    Each bf16[1, kv_heads, kept, head_dim]; ``kept`` is ``tokens`` on full layers, on sliding ones at most the window
    but for the next token's own place.
    """
    generator = torch.Generator(device).manual_seed(seed)
    cache = DynamicCache(config=config)
    for layer in _layers(cache):
        kept = min(tokens, layer.sliding_window - 1) if layer.is_sliding else tokens
        shape = (1, config.num_key_value_heads, kept, config.head_dim)
        keys, values = (torch.randn(shape, generator=generator, device=device, dtype=_DTYPE) for _ in range(2))
        layer.update(keys, values)
        if layer.is_sliding:
            # It counts the tokens it has seen, not those it keeps: masks and positions follow from that.
            layer.cumulative_length = tokens
    return cache


def _layers(cache: DynamicCache) -> list[Any]:
    """Layers of a cache, each a DynamicLayer or a DynamicSlidingWindowLayer."""
    return list(cache.layers)


@dataclass
class TransformersStep:
    """A model and a cache of ``tokens`` tokens; every run is of the token that follows them.

    forward: what is called, the model without its head or a compiled form of it.
    """

    model: FlintForCausalLM
    cache: DynamicCache
    tokens: int
    forward: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.forward = self.model.model
        #: i64[1, 1], the token of the step.
        self.ids = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        self._filled = [(layer.keys, layer.values) for layer in _layers(self.cache)]

    def restore(self, repeat: int) -> None:
        """Take back what a run has added to the cache; ``repeat`` chooses the token."""
        for layer, (keys, values) in zip(_layers(self.cache), self._filled, strict=True):
            # A run puts longer tensors in their place, and leaves these as they are.
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                layer.cumulative_length = self.tokens
        generator = torch.Generator().manual_seed(repeat)
        self.ids.copy_(torch.randint(0, self.model.config.vocab_size, (1, 1), generator=generator))

    @torch.no_grad()
    def run(self) -> Tensor:
        """Final hidden states of the token: bf16[1, 1, hidden]. The cache holds one token more afterwards."""
        states: Tensor = self.forward(input_ids=self.ids, cache=self.cache, use_cache=True).last_hidden_state
        return states

    def compile(self, backend: str = "inductor") -> None:
        """Have ``torch.compile`` in its default mode make what runs."""
        self.forward = torch.compile(self.model.model, backend=backend)


def make_step(published: Mapping[str, Any], tokens: int, device: str) -> TransformersStep:
    """A step at the sizes of the config.json ``published``."""
    config = FlintConfig.from_dict(dict(published))
    return TransformersStep(random_model(config, device), filled_cache(config, tokens, device), tokens)


def measure_transformers(published: Mapping[str, Any], tokens: int, repeats: int, compiled: bool) -> StepFigures:
    """Median of ``repeats`` steps on the GPU, by events, and the kernels of one step."""
    step = make_step(published, tokens, "cuda")
    model: Any = step.model
    # As `generate` does around its decode steps: it takes the experts for few tokens.
    with model._optimize_model_for_decode():
        if compiled:
            step.compile()
        timing = time_device(step.run, repeats, step.restore)
        step.restore(0)
        kernels, others = counted(device_events(step.run))
        config = model.config
        how = f"attention {config._attn_implementation}, experts {config._experts_implementation}"
    return StepFigures(timing.median, kernels, None, f"{how}; copies and fills of memory, not counted: {others}")


def counted(events: Iterable[Any]) -> tuple[int, int]:
    """Kernels among ``events`` of the GPU, and copies and fills of memory; marks of a span are neither."""
    names = [e.name for e in events if not e.is_user_annotation]
    others = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - others, others
