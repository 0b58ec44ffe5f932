"""Random small Flints as NVFP4 GGUF files, written by package gguf alone, and the same models in transformers.

Nothing here knows of flintc: blocks are random bytes, and what they mean is gguf's own dequantiser's word.
"""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import FlintConfig, FlintForCausalLM

NVFP4 = gguf.GGMLQuantizationType.NVFP4


def random_config(seed: int) -> FlintConfig:
    """A legal config whose rows are whole NVFP4 blocks of 64 values."""
    rng = random.Random(seed)
    layers = rng.randint(2, 5)
    kinds = ["full_attention", "sliding_attention"]
    kv_heads, group = rng.choice([(1, 2), (2, 1), (2, 2), (1, 4)])
    experts = rng.choice([4, 6])
    expert_width = rng.choice([64, 128])
    return FlintConfig(
        vocab_size=rng.choice([90, 160]),
        hidden_size=rng.choice([64, 128]),
        intermediate_size=rng.choice([64, 192]),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0])},
        sliding_window=rng.choice([2, 5, 13]),
        num_experts=experts,
        num_experts_per_tok=rng.randint(1, experts),
        moe_intermediate_size=expert_width,
        shared_expert_intermediate_size=expert_width * rng.choice([1, 2]),
        rms_norm_eps=1e-6,
        mlp_only_layers=list(range(rng.randint(0, layers - 1))),
        layer_types=[rng.choice(kinds) for _ in range(layers)],
    )


class Flint:
    """Draws a model's weights, hands each to a GGUF file and to a transformers model.

    same_scales: q, k, v and gate, up share a tensor scale, as published; else each has its own.
    drop_scales: leave out every ``.scale``, so that weights are what the blocks say.
    bf16_router: store routers in BF16 rather than F32. config: in place of a random one.
    """

    def __init__(
        self,
        seed: int,
        same_scales: bool = False,
        drop_scales: bool = False,
        bf16_router: bool = False,
        config: FlintConfig | None = None,
    ) -> None:
        self.config = config or random_config(seed)
        self.metadata = _metadata(self.config)
        self.random = np.random.default_rng(seed)
        self.same_scales, self.drop_scales, self.bf16_router = same_scales, drop_scales, bf16_router
        self.tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}
        self.state: dict[str, torch.Tensor] = {}
        self._draw()

    def _draw(self) -> None:
        c = self.config
        embed = self.random.standard_normal((c.vocab_size, c.hidden_size), dtype=np.float32)
        self._bf16("token_embd.weight", "model.embed_tokens.weight", embed)
        self._norm("output_norm.weight", "model.norm.weight", c.hidden_size)
        self._linear("output", "lm_head.weight", c.vocab_size, c.hidden_size, gain=2.5)
        for n in range(c.num_hidden_layers):
            self._attention(f"blk.{n}.", f"model.layers.{n}.")
            if n in c.mlp_only_layers:
                self._mlp(f"blk.{n}.ffn_{{}}", f"model.layers.{n}.mlp.", c.intermediate_size)
            else:
                self._experts(f"blk.{n}.", f"model.layers.{n}.mlp.")

    def _attention(self, ours: str, theirs: str) -> None:
        c = self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self._norm(f"{ours}attn_norm.weight", f"{theirs}input_layernorm.weight", c.hidden_size)
        self._norm(f"{ours}ffn_norm.weight", f"{theirs}post_attention_layernorm.weight", c.hidden_size)
        self._norm(f"{ours}attn_q_norm.weight", f"{theirs}self_attn.q_norm.weight", c.head_dim)
        self._norm(f"{ours}attn_k_norm.weight", f"{theirs}self_attn.k_norm.weight", c.head_dim)
        sinks = 3 * self.random.standard_normal(c.num_attention_heads, dtype=np.float32)
        self._f32(f"{ours}attn_sinks.weight", f"{theirs}self_attn.sinks", sinks)
        shared = self._scale(c.hidden_size)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            self._linear(f"{ours}attn_{name}", f"{theirs}self_attn.{name}_proj.weight", rows, c.hidden_size, shared)
        self._linear(f"{ours}attn_output", f"{theirs}self_attn.o_proj.weight", c.hidden_size, q)

    def _mlp(self, ours: str, theirs: str, width: int) -> None:
        c, shared = self.config, self._scale(self.config.hidden_size)
        for name in ("gate", "up"):
            self._linear(ours.format(name), f"{theirs}{name}_proj.weight", width, c.hidden_size, shared)
        self._linear(ours.format("down"), f"{theirs}down_proj.weight", c.hidden_size, width)

    def _experts(self, ours: str, theirs: str) -> None:
        c = self.config
        router = self.random.standard_normal((c.num_experts, c.hidden_size), dtype=np.float32) * 2.5
        router /= np.float32(c.hidden_size**0.5)
        (self._bf16 if self.bf16_router else self._f32)(f"{ours}ffn_gate_inp.weight", f"{theirs}gate.weight", router)
        self._mlp(f"{ours}ffn_{{}}_shexp", f"{theirs}shared_expert.", c.shared_expert_intermediate_size)
        shared = self._scale(c.hidden_size, c.num_experts)
        width = c.moe_intermediate_size
        parts = [
            self._packed(f"{ours}ffn_{name}_exps", (c.num_experts, width, c.hidden_size), shared)
            for name in ("gate", "up")
        ]
        self.state[f"{theirs}experts.gate_up_proj"] = torch.from_numpy(np.concatenate(parts, axis=1))
        down = self._packed(f"{ours}ffn_down_exps", (c.num_experts, c.hidden_size, width))
        self.state[f"{theirs}experts.down_proj"] = torch.from_numpy(down)

    def _scale(self, columns: int, experts: int = 1, gain: float = 1.0) -> np.ndarray:
        """Tensor scales, one per expert, that bring random blocks to a deviation of about gain / sqrt(columns)."""
        spread = self.random.uniform(0.5, 1.5, experts)
        return (gain * spread / 4 / columns**0.5).astype(np.float32)

    def _packed(
        self, name: str, shape: tuple[int, ...], scale: np.ndarray | None = None, gain: float = 1.0
    ) -> np.ndarray:
        """Random blocks under ``name``, and what they mean. Scale bytes include 0x7F and set sign bits."""
        blocks = self.random.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), dtype=np.uint8)
        heads = self.random.integers(0x30, 0x40, blocks[..., :4].shape, dtype=np.uint8)
        if self.drop_scales:  # small block scales do the work of the tensor scale
            heads -= 0x28
        odd = self.random.random(heads.shape)
        heads[odd < 0.02] = 0x7F
        heads[odd > 0.95] |= 0x80
        heads[heads == 0xFF] = 0
        blocks[..., :4] = heads
        blocks = blocks.reshape(*shape[:-1], -1)
        self.tensors[f"{name}.weight"] = (blocks, NVFP4)
        values = gguf.quants.dequantize(blocks, NVFP4)
        experts = shape[0] if len(shape) == 3 else 1
        if self.drop_scales:
            return values
        if scale is None or not self.same_scales:
            scale = self._scale(shape[-1], experts, gain)
        self.tensors[f"{name}.scale"] = (scale, gguf.GGMLQuantizationType.F32)
        return values * scale.reshape(-1, *[1] * (len(shape) - 1))

    def _linear(
        self, ours: str, theirs: str, rows: int, columns: int, scale: np.ndarray | None = None, gain: float = 1.0
    ) -> None:
        values = self._packed(ours, (rows, columns), scale, gain)
        self.state[theirs] = torch.from_numpy(values.reshape(rows, columns))

    def _norm(self, ours: str, theirs: str, size: int) -> None:
        self._f32(ours, theirs, 1 + 0.3 * self.random.standard_normal(size, dtype=np.float32))

    def _f32(self, ours: str, theirs: str, values: np.ndarray) -> None:
        self.tensors[ours] = (values, gguf.GGMLQuantizationType.F32)
        self.state[theirs] = torch.from_numpy(values)

    def _bf16(self, ours: str, theirs: str, values: np.ndarray) -> None:
        rounded = torch.from_numpy(values).to(torch.bfloat16)
        self.tensors[ours] = (rounded.view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16)
        self.state[theirs] = rounded.float()

    def oracle(self) -> FlintForCausalLM:
        """The model in transformers, FP32, every parameter set."""
        self.config._attn_implementation = "eager"
        self.config._experts_implementation = "eager"
        model = FlintForCausalLM(self.config).eval()
        model.load_state_dict(self.state, strict=True)
        return model

    def write(self, path: Path) -> None:
        """One GGUF file of ``metadata`` and ``tensors``."""
        writer = gguf.GGUFWriter(path, "flint")
        for key, value in self.metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _metadata(c: FlintConfig) -> dict[str, object]:
    """Every key that a published file has for its model, save the architecture."""
    sliding = [kind == "sliding_attention" for kind in c.layer_types]
    keys = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "rope_pattern": sliding,
        "rope.freq_base": c.rope_parameters["rope_theta"],
        "rope.dimension_count": c.head_dim,
        "leading_dense_block_count": len(c.mlp_only_layers),
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "expert_shared_count": c.shared_expert_intermediate_size // c.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
    }
    return {"general.name": "a random Flint", **{f"flint.{key}": value for key, value in keys.items()}}
