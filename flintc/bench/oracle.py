"""The independent side of ``flintc verify``: transformers' Flint on weights read by safetensors or gguf alone.

This module imports nothing of flintc, so that a mistake in flintc's loader, graph or kernels cannot hide in what it is
compared with. It runs layer by layer, and gives logits prompt by prompt: the weights of one layer and the logits of one
prompt are in memory at a time, whatever the model's size.
Needs transformers 5.24 (``pip install 'flintc[verify]'``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import FlintConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.flint.modeling_flint import FlintDecoderLayer, FlintRMSNorm, FlintRotaryEmbedding

#: Parameters that transformers keeps in FP32 whatever the model's dtype.
_KEPT_FP32 = ("mlp.gate.weight", "self_attn.sinks")
#: Reads the parameter of a name in transformers' naming, FP32 on the CPU.
Reader = Callable[[str], Tensor]
#: Called with (layers done, layers in all, what is being done).
Progress = Callable[[int, int, str], None]


class Oracle:
    """A checkpoint in transformers.

    path: a folder of safetensors, or a .gguf file. config: folder with the config.json of a .gguf file that leaves
    something out, or in place of the folder's own.
    """

    def __init__(self, path: Path, config: Path | None = None, device: str = "cpu") -> None:
        self.device = device
        if path.is_dir():
            self.config = FlintConfig.from_pretrained(config or path)
            self._read: Reader = _SafetensorsReader(path)
        else:
            file = gguf.GGUFReader(path)
            self.config = FlintConfig.from_pretrained(config) if config is not None else _gguf_config(file)
            self._read = _GgufReader(file)
        self.config._attn_implementation = "eager"
        self.config._experts_implementation = "eager"

    @torch.no_grad()
    def logits(
        self, prompts: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], progress: Progress | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Logits after each token, one prompt after the other: f32[T, vocab] on the device for each of ``dtypes``.

        A dtype is that of weights and activations. Every weight is read once.
        """
        hidden = self._embedded(prompts, dtypes)
        layers = self.config.num_hidden_layers
        for number in range(layers):
            self._advance(number, hidden)
            if progress is not None:
                progress(number + 1, layers, f"layer {number} in transformers")
        scale, head = self._read("model.norm.weight"), self._read("lm_head.weight")
        norms, heads = [], []
        for dtype in dtypes:
            norm = FlintRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
            norm.weight.data = self._on_device(scale, dtype)
            norms.append(norm)
            heads.append(self._on_device(head, dtype))
        for states in zip(*hidden, strict=True):
            each = zip(states, norms, heads, strict=True)
            yield tuple(torch.nn.functional.linear(norm(x)[0], weight).float() for x, norm, weight in each)

    def _embedded(self, prompts: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[list[Tensor]]:
        """Hidden states [1, T, hidden] before the first layer, by dtype and prompt."""
        embed = self._read("model.embed_tokens.weight")
        return [[self._on_device(embed[list(ids)], dtype)[None] for ids in prompts] for dtype in dtypes]

    def _advance(self, number: int, hidden: Sequence[list[Tensor]]) -> None:
        """Run layer ``number`` on the states of every prompt, once per dtype."""
        rotary = FlintRotaryEmbedding(self.config).to(self.device)
        with torch.device("meta"):
            names = [name for name, _ in FlintDecoderLayer(self.config, number).named_parameters()]
        stored = {name: self._read(f"model.layers.{number}.{name}") for name in names}
        for prompts in hidden:
            layer = self._layer(number, stored, prompts[0].dtype)
            for i, states in enumerate(prompts):
                at = torch.arange(states.shape[1], device=self.device)[None]
                prompts[i] = layer(
                    states,
                    attention_mask=self._mask(number, states, at),
                    position_ids=at,
                    position_embeddings=rotary(states, at),
                )
            del layer  # before the next one is made

    def _layer(self, number: int, stored: Mapping[str, Tensor], dtype: torch.dtype) -> FlintDecoderLayer:
        """Layer ``number`` with its weights."""
        with torch.device("meta"):
            layer = FlintDecoderLayer(self.config, number)
        state = {
            name: self._on_device(weight, torch.float32 if name.endswith(_KEPT_FP32) else dtype)
            for name, weight in stored.items()
        }
        layer.load_state_dict(state, strict=True, assign=True)
        return layer.eval()

    def _on_device(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(self.device, dtype)

    def _mask(self, number: int, states: Tensor, at: Tensor) -> Tensor | None:
        assert self.config.layer_types is not None
        sliding = self.config.layer_types[number] == "sliding_attention"
        create = create_sliding_window_causal_mask if sliding else create_causal_mask
        mask: Tensor | None = create(
            config=self.config, inputs_embeds=states, attention_mask=None, cache=None, position_ids=at
        )
        return mask


class _SafetensorsReader:
    """Published names, or those that transformers has in memory."""

    def __init__(self, folder: Path) -> None:
        #: Tensor name -> the open file that holds it.
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, "pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def __call__(self, name: str) -> Tensor:
        if name.endswith(".sinks") and name not in self._files:
            return self._stored(f"{name.removesuffix('sinks')}softmax_offset")
        before, experts, part = name.partition("mlp.experts.")
        if not experts or name in self._files:
            return self._stored(name)
        prefix, found = before + experts, list[Tensor]()
        while f"{prefix}{len(found)}.down_proj.weight" in self._files:
            found.append(self._expert(f"{prefix}{len(found)}.", part))
        return torch.stack(found)

    def _expert(self, prefix: str, part: str) -> Tensor:
        words = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        return torch.cat([self._stored(f"{prefix}{word}.weight") for word in words])

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.float()


#: Parameters of a layer -> tensors of a GGUF file, concatenated along the output rows.
_GGUF_LAYER = {
    "input_layernorm.weight": ("attn_norm",),
    "post_attention_layernorm.weight": ("ffn_norm",),
    "self_attn.q_proj.weight": ("attn_q",),
    "self_attn.k_proj.weight": ("attn_k",),
    "self_attn.v_proj.weight": ("attn_v",),
    "self_attn.o_proj.weight": ("attn_output",),
    "self_attn.q_norm.weight": ("attn_q_norm",),
    "self_attn.k_norm.weight": ("attn_k_norm",),
    "self_attn.sinks": ("attn_sinks",),
    "mlp.gate_proj.weight": ("ffn_gate",),
    "mlp.up_proj.weight": ("ffn_up",),
    "mlp.down_proj.weight": ("ffn_down",),
    "mlp.gate.weight": ("ffn_gate_inp",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp",),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp",),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp",),
}
_GGUF_GLOBAL = {
    "model.embed_tokens.weight": ("token_embd",),
    "model.norm.weight": ("output_norm",),
    "lm_head.weight": ("output",),
}


class _GgufReader:
    """Tensors as package gguf dequantises them, times their ``.scale`` where the file has one."""

    def __init__(self, file: gguf.GGUFReader) -> None:
        self._tensors = {tensor.name: tensor for tensor in file.tensors}

    def __call__(self, name: str) -> Tensor:
        if name in _GGUF_GLOBAL:
            return self._stored(_GGUF_GLOBAL[name][0])
        number, _, part = name.removeprefix("model.layers.").partition(".")
        found = [self._stored(f"blk.{number}.{stored}") for stored in _GGUF_LAYER[part]]
        return torch.cat(found, dim=-2) if len(found) > 1 else found[0]

    def _stored(self, name: str) -> Tensor:
        tensor = self._tensors[f"{name}.weight"]
        values = _dequantized(tensor).astype(np.float32, copy=False)
        weight = torch.from_numpy(values.reshape(tensor.shape[::-1].tolist()))
        scale = self._tensors.get(f"{name}.scale")
        if scale is None:
            return weight
        factor = torch.from_numpy(np.array(scale.data, dtype=np.float32))
        return weight * factor.view(-1, *[1] * (weight.ndim - 1))


def _dequantized(tensor: gguf.ReaderTensor) -> np.ndarray[Any, Any]:
    """Values of a tensor, some of its rows or experts per thread: package gguf takes a second for 30 million."""
    workers = min(len(tensor.data), os.cpu_count() or 1) if tensor.data.ndim > 1 else 1
    parts = np.array_split(tensor.data, workers)
    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate([*pool.map(lambda part: gguf.quants.dequantize(part, tensor.tensor_type), parts)])


def _gguf_config(file: gguf.GGUFReader) -> FlintConfig:
    """The config that a GGUF file's metadata describe."""
    get = {name.removeprefix("flint."): field.contents() for name, field in file.fields.items()}
    embed = next(tensor for tensor in file.tensors if tensor.name == "token_embd.weight")
    kinds = {True: "sliding_attention", False: "full_attention"}
    return FlintConfig(
        vocab_size=int(embed.shape[1]),
        hidden_size=get["embedding_length"],
        intermediate_size=get["feed_forward_length"],
        num_hidden_layers=get["block_count"],
        num_attention_heads=get["attention.head_count"],
        num_key_value_heads=get["attention.head_count_kv"],
        head_dim=get["attention.key_length"],
        max_position_embeddings=get["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": get.get("rope.freq_base", 10000.0)},
        sliding_window=get["attention.sliding_window"],
        num_experts=get["expert_count"],
        num_experts_per_tok=get["expert_used_count"],
        moe_intermediate_size=get["expert_feed_forward_length"],
        shared_expert_intermediate_size=get["expert_shared_feed_forward_length"],
        rms_norm_eps=get["attention.layer_norm_rms_epsilon"],
        mlp_only_layers=list(range(get["leading_dense_block_count"])),
        layer_types=[kinds[bool(flag)] for flag in get["attention.sliding_window_pattern"]],
    )
