"""Random small Flints made and run by transformers alone: the side of the oracle that knows nothing of flintc."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import FlintConfig, FlintForCausalLM
from transformers.utils import logging

COUNT = 24

logging.disable_progress_bar()


def random_config(seed: int) -> FlintConfig:
    """Sizes, layer kinds, windows, experts and theta by ``seed``; the first few are the extreme layer lists."""
    rng = random.Random(seed)
    layers = rng.randint(2, 6)
    kinds = ["full_attention", "sliding_attention"]
    layer_types = [rng.choice(kinds) for _ in range(layers)]
    dense = sorted(rng.sample(range(layers), rng.randint(0, layers - 1)))
    if seed in (0, 1):
        layer_types = [kinds[seed]] * layers
    if seed in (1, 2):
        dense = []
    if seed == 3:
        dense = list(range(layers))
    kv_heads = rng.choice([1, 2, 3])
    experts = rng.choice([4, 7, 16])
    return FlintConfig(
        vocab_size=rng.choice([101, 256]),
        hidden_size=rng.choice([48, 64, 96]),
        intermediate_size=rng.choice([80, 128]),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * rng.choice([1, 2, 4]),
        num_key_value_heads=kv_heads,
        head_dim=rng.choice([8, 16, 32]),
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0, 500000.0])},
        sliding_window=rng.choice([1, 2, 5, 13, 24]),
        num_experts=experts,
        num_experts_per_tok=rng.randint(1, min(6, experts)),
        moe_intermediate_size=rng.choice([16, 40]),
        shared_expert_intermediate_size=rng.choice([24, 56]),
        rms_norm_eps=rng.choice([1e-6, 1e-5]),
        mlp_only_layers=dense,
        layer_types=layer_types,
    )


def random_model(seed: int, dtype: torch.dtype = torch.float32) -> FlintForCausalLM:
    """A model with activations near one, varied routing and sinks, and logits that spread over a few nats."""
    generator = torch.Generator().manual_seed(seed)
    model = FlintForCausalLM(random_config(seed)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("sinks"):
                weight.copy_(3 * noise)
            elif name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                gain = 2.5 if "lm_head" in name or name.endswith("gate.weight") else 1.0
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
    return model.to(dtype)


def random_prompt(seed: int, vocab: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def load(path: Path, dtype: torch.dtype) -> FlintForCausalLM:
    """What transformers makes of a saved checkpoint, with its plain implementations of attention and experts."""
    return FlintForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def logits(model: FlintForCausalLM, ids: list[int]) -> Tensor:
    """[T, vocab] FP32."""
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def greedy(model: FlintForCausalLM, ids: list[int], count: int) -> list[int]:
    """``count`` tokens after ``ids``, each from a whole forward pass without a cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[-count:]
