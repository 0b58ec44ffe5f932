"""Step 2 of 3: trains transformers' Flint on the packed corpus, in minutes on one GPU.

    python examples/tiny-flint/train.py --corpus out/tiny-flint/corpus.npz --out DIR

Needs torch, transformers 5.24 and numpy alone. Writes the model as transformers saves it and ``training.json``:
the loss curve, and bits per byte on the held-out files.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, FlintConfig, FlintForCausalLM
from transformers.models.flint.modeling_flint import load_balancing_loss_func

#: Flint's structure: full attention without positions on layers 0, 1, 5 and the last, a window elsewhere; dense MLPs
#: in layers 0 and 1, experts and a shared expert elsewhere.
CONFIG = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": 65,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "mlp_only_layers": [0, 1],
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train. ``tokens`` per window, ``batch`` windows per step."""

    steps: int = 3000
    batch: int = 48
    tokens: int = 1024
    peak: float = 3e-3
    warmup: int = 100
    floor: float = 0.02
    decay: float = 0.1
    clip: float = 1.0
    #: Weight of the loss that keeps experts in use.
    balance: float = 0.01
    seed: int = 0
    #: Share of the windows that begin where a text begins.
    from_start: float = 0.3
    evaluate_every: int = 500

    def rate(self, step: int, steps: int) -> float:
        """Learning rate: linear warm-up, then a cosine down to ``floor`` of the peak."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


#: Keys appended for the sink: one that counts, and seven to keep rows of the mask aligned.
EXTRA = 8


def sink_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention with sinks through torch's fused kernel, which keeps no score matrix.

    The sink is one more key with a value of zero: eight further channels, of which queries hold (1, 0, ...) and the
    sink's key (sink / scaling, 0, ...), make its score the sink itself. ``attention_mask`` [1, 1, T, T + 8] adds zero
    or -inf and lets every query see the sink.
    """
    batch, heads, _, _ = query.shape
    groups = heads // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    pad = torch.nn.functional.pad
    ones = torch.ones_like(query[..., :1])
    query = torch.cat((query, pad(ones, (0, EXTRA - 1))), -1)
    sink = pad((module.sinks / scaling).to(key.dtype).view(1, heads, 1, 1), (key.shape[-1], EXTRA - 1, 0, EXTRA - 1))
    key = torch.cat((pad(key, (0, EXTRA)), sink.expand(batch, -1, -1, -1)), 2)
    value = pad(value, (0, 0, 0, EXTRA))
    mask = attention_mask.to(query.dtype).expand(batch, heads, -1, -1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.transpose(1, 2), None


def masks(tokens: int, window: int, device: str) -> dict[str, Tensor]:
    """Additive masks [1, 1, T, T + 8] for :func:`sink_attention` by kind of layer."""
    at = torch.arange(tokens, device=device)
    distance = at[:, None] - at
    sink = torch.arange(EXTRA, device=device).eq(0).expand(tokens, -1)
    full = distance >= 0
    seen = {"full_attention": full, "sliding_attention": full & (distance < window)}
    return {
        kind: torch.zeros((), device=device).where(torch.cat((visible, sink), 1), -torch.inf)[None, None]
        for kind, visible in seen.items()
    }


class Corpus:
    """Windows of the packed training text, and the held-out texts."""

    def __init__(self, path: Path, recipe: Recipe, device: str) -> None:
        packed = np.load(path)
        self.train = torch.from_numpy(packed["train"].astype(np.int32)).to(device)
        self.starts = torch.from_numpy(packed["starts"]).to(device)
        self.held_out = torch.from_numpy(packed["held_out"].astype(np.int64))
        self.held_out_starts = packed["held_out_starts"].tolist()
        self.recipe, self.device = recipe, device
        self.generator = torch.Generator(device).manual_seed(recipe.seed)

    def batch(self) -> Tensor:
        """Ids [batch, tokens + 1] at random places, some of them at the beginning of a text."""
        size, length = self.recipe.batch, self.recipe.tokens + 1
        last = len(self.train) - length
        begin = torch.randint(last, (size,), generator=self.generator, device=self.device)
        text = torch.randint(len(self.starts), (size,), generator=self.generator, device=self.device)
        from_start = torch.rand(size, generator=self.generator, device=self.device) < self.recipe.from_start
        begin = torch.where(from_start, self.starts[text], begin).clamp(max=last)
        return self.train[begin[:, None] + torch.arange(length, device=self.device)].long()

    def windows(self) -> Iterator[tuple[Tensor, int]]:
        """Held-out ids [1, up to tokens] and how many at the end count: each id counts once, with half a window before.

        The first id, an end-of-text, counts nothing.
        """
        tokens = self.recipe.tokens
        stops = [*(start - 1 for start in self.held_out_starts[1:]), len(self.held_out) - 1]
        for start, stop in zip(self.held_out_starts, stops, strict=True):
            text = self.held_out[start - 1 : stop]
            done = 1
            while done < len(text):
                end = min(len(text), tokens if done == 1 else done + tokens // 2)
                yield text[max(0, end - tokens) : end][None], end - done
                done = end


@torch.no_grad()
def held_out_bits(model: FlintForCausalLM, corpus: Corpus, most: int | None = None) -> float:
    """Bits that the model needs for the held-out texts (the first ``most`` windows), per id."""
    bits, ids = 0.0, 0
    for number, (window, count) in enumerate(corpus.windows()):
        if number == most:
            break
        window = window.to(corpus.device)
        attention = masks(window.shape[1], model.config.sliding_window, corpus.device)
        logits = model(window, attention_mask=attention, use_cache=False).logits[0]
        lost = torch.nn.functional.cross_entropy(logits[-count - 1 : -1].float(), window[0, -count:], reduction="sum")
        bits += float(lost) / math.log(2)
        ids += count
    return bits / ids


def make_optimizer(model: FlintForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak, betas=(0.9, 0.95), fused=True)


def train(model: FlintForCausalLM, corpus: Corpus, recipe: Recipe, seconds: float) -> list[dict[str, float]]:
    """Train for ``recipe.steps`` steps, or as many as fit into ``seconds``; returns the curve."""
    optimizer = make_optimizer(model, recipe)
    attention = masks(recipe.tokens, model.config.sliding_window, corpus.device)
    attention = {kind: mask.to(torch.bfloat16) for kind, mask in attention.items()}
    curve: list[dict[str, float]] = []
    steps, begin = recipe.steps, time.monotonic()
    recent = torch.zeros((), device=corpus.device)
    step = 0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, steps)
        ids = corpus.batch()
        with torch.autocast(corpus.device, torch.bfloat16):
            loss, balance = losses(model, ids, attention)
        (loss + recipe.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += loss.detach()
        step += 1
        if step % 50 == 0 or step == steps:
            spent = time.monotonic() - begin
            point = {"step": step, "loss": float(recent) / (step % 50 or 50), "seconds": round(spent, 2)}
            recent.zero_()
            if step == 50:  # by now the speed is known
                steps = max(step, min(steps, int(step * seconds / spent)))
            if step % recipe.evaluate_every == 0:
                point["held_out_bits_per_token"] = held_out_bits(model, corpus, most=40)
            curve.append(point)
            print(json.dumps(point), flush=True)
    return curve


def losses(model: FlintForCausalLM, ids: Tensor, attention: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy per id in nats, and how unevenly experts are used."""
    out = model.model(ids[:, :-1], attention_mask=attention, use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state).float()
    balance = load_balancing_loss_func(out.router_logits, model.num_experts, model.num_experts_per_tok)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), balance


def rounded(model: FlintForCausalLM) -> FlintForCausalLM:
    """The model with every weight a BF16 number, as it is published; routers and sinks stay FP32."""
    for name, weight in model.named_parameters():
        if not name.endswith(("mlp.gate.weight", "sinks")):
            weight.data = weight.data.to(torch.bfloat16)
    return model


def main() -> None:
    """Train, round to BF16, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("out/tiny-flint/corpus.npz"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--tokens", type=int, default=Recipe.tokens)
    parser.add_argument("--seconds", type=float, default=240.0, help="train fewer steps where they would take longer")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps, batch=arguments.batch, tokens=arguments.tokens)
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    AttentionInterface.register("sink_attention", sink_attention)
    config = FlintConfig(**CONFIG, attn_implementation="sink_attention", experts_implementation="eager")
    model = FlintForCausalLM(config).to(arguments.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    corpus = Corpus(arguments.corpus, recipe, arguments.device)
    curve = train(model, corpus, recipe, arguments.seconds)
    # Saved before anything else can fail.
    arguments.out.mkdir(parents=True, exist_ok=True)
    rounded(model).save_pretrained(arguments.out)
    torch.set_float32_matmul_precision("highest")
    bits = held_out_bits(model.float(), corpus)
    facts = {"recipe": asdict(recipe), "torch": torch.__version__, "device": device_name(arguments.device)}
    facts |= {"held_out_bits_per_token": bits, "curve": curve}
    (arguments.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"held out: {bits:.4f} bits per token", flush=True)


def device_name(device: str) -> str:
    """What it was trained on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


if __name__ == "__main__":
    main()
