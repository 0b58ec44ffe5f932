"""Opens and loads mutants: each is refused with a flintc error, or loads what independent readers find in it.

``python tests/checkpoint/fuzz.py --mutants 100000 --seed 0`` prints the counts that docs/fuzzing.md records.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants import EXPERTS, STRUCTURAL, Mutant, Mutator

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from flintc.errors import FlintcError
from flintc.ir.build import build
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel, spec_for

#: No mutant may take longer, in seconds of this process.
LONGEST = 10.0
#: Seconds of the clock after which a mutant is given up.
PATIENCE = 120
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

Values = dict[str, np.ndarray]


@dataclass
class Outcome:
    """Counts of a run. ``wrong``: number and reason of every mutant that was neither refused nor loaded correctly."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def structural(self) -> float:
        """Share of mutants that hit header, metadata, directory, index, config or the set of files."""
        hit = sum(n for (_, part, _), n in self.counts.items() if part in STRUCTURAL)
        return hit / max(1, self.counts.total())


def fuzz(mutants: range, seed: int, seconds: float = math.inf) -> Outcome:
    """Run ``mutants`` of ``seed``, or as many as fit ``seconds``."""
    outcome, start = Outcome(), time.monotonic()
    with tempfile.TemporaryDirectory() as bases, tempfile.TemporaryDirectory() as work:
        mutator = Mutator(Path(bases), Path(work), seed)
        for number in mutants:
            if time.monotonic() - start > seconds:
                break
            mutant = mutator.make(number)
            begin = time.process_time()
            result = attempt(mutant)
            outcome.slowest = max(outcome.slowest, time.process_time() - begin)
            verdict = result if result in ("refused", "loaded") else "wrong"
            outcome.counts[mutant.form, mutant.part, verdict] += 1
            if verdict == "wrong":
                outcome.wrong.append((number, f"{mutant.form}/{mutant.part}: {result}"))
    return outcome


class Hang(Exception):
    """A mutant took too long."""


def _hang(*_: object) -> None:
    raise Hang


def attempt(mutant: Mutant) -> str:
    """``refused``, ``loaded`` (and equal to what other readers find), or what went wrong."""
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(PATIENCE)
    try:
        return _attempt(mutant)
    finally:
        signal.alarm(0)


def _attempt(mutant: Mutant) -> str:
    try:
        checkpoint = open_checkpoint(mutant.path)
        tokenizer_from_gguf(checkpoint.metadata)
        match = checkpoint.spec_match
        model = checkpoint.bind(spec_for(match.architecture, match.gguf))
        loaded = checkpoint.load(build(model, checkpoint.weights_format), model)
    except FlintcError as error:
        return "refused" if "\n" not in str(error) else f"an error of several lines: {error}"
    except Exception:
        return traceback.format_exc(limit=-3)
    theirs = gguf_values(mutant.path) if mutant.form == "gguf" else folder_values(mutant.path)
    return compare(loaded, mutant.form, theirs) or compare_sizes(mutant, model) or "loaded"


def gguf_values(path: Path) -> Values:
    """Every weight of a GGUF file, by package gguf."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    values: Values = {}
    for name, t in tensors.items():
        value = np.array(t.data)
        if t.tensor_type.name == "NVFP4":
            scale = tensors.get(f"{name.removesuffix('.weight')}.scale")
            factor = np.float32([1]) if scale is None else np.array(scale.data)
            value = gguf.quants.dequantize(value, t.tensor_type)
            value = value * factor.reshape(-1, *[1] * (value.ndim - 1))
        elif t.tensor_type.name == "BF16":
            value = (value.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        values[name] = value
    return values


def folder_values(folder: Path) -> Values:
    """Every weight of a folder, by package safetensors; packed ones unpacked here."""
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    stored: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        stored |= load_file(folder / file)
    values: Values = {}
    for name, t in stored.items():
        if f"{name}_scale" in stored:
            codes = t.numpy()
            nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
            scales = stored[f"{name}_scale"].float().numpy().repeat(16, axis=-1)
            values[name] = E2M1[nibbles] * scales * stored[f"{name}_scale_2"].numpy().reshape(-1)[0]
        else:
            values[name] = t.float().numpy()
    return values


#: Stored tensors of each weight, one under the other: in GGUF, and as published in safetensors.
NAMES: dict[str, tuple[str, str]] = {
    "w.embed": ("token_embd.weight", "model.embed_tokens.weight"),
    "w.final_norm": ("output_norm.weight", "model.norm.weight"),
    "w.head": ("output.weight", "lm_head.weight"),
    "input_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "mlp_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "sinks": ("attn_sinks.weight", "self_attn.softmax_offset"),
    "qkv": (
        "attn_q.weight attn_k.weight attn_v.weight",
        "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    ),
    "o": ("attn_output.weight", "self_attn.o_proj.weight"),
    "dense_gate_up": ("ffn_gate.weight ffn_up.weight", "mlp.gate_proj.weight mlp.up_proj.weight"),
    "dense_down": ("ffn_down.weight", "mlp.down_proj.weight"),
    "router": ("ffn_gate_inp.weight", "mlp.gate.weight"),
    "expert_gate_up": (
        "ffn_gate_exps.weight ffn_up_exps.weight",
        "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
    ),
    "expert_down": ("ffn_down_exps.weight", "mlp.experts.{e}.down_proj.weight"),
    "shared_gate_up": (
        "ffn_gate_shexp.weight ffn_up_shexp.weight",
        "mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight",
    ),
    "shared_down": ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
}


def expected(name: str, form: str, theirs: Values) -> np.ndarray:
    """Weight ``name`` of a graph, put together from stored tensors."""
    layer, _, source = name.rpartition(".w.")
    names = NAMES[source if layer else name][0 if form == "gguf" else 1].split()
    prefix = "" if not layer else f"blk.{layer[1:]}." if form == "gguf" else f"model.layers.{layer[1:]}."

    def stacked(expert: int) -> np.ndarray:
        parts = [theirs[prefix + n.replace("{e}", str(expert))] for n in names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)

    return np.stack([stacked(e) for e in range(EXPERTS)]) if "{e}" in names[0] else stacked(0)


def compare(loaded: dict[str, torch.Tensor | Nvfp4], form: str, theirs: Values) -> str | None:
    """What differs between what was loaded and what the other readers find; None where nothing does."""
    for name, weight in loaded.items():
        ours = (weight.dequantize() if isinstance(weight, Nvfp4) else weight.float()).numpy()
        if not np.array_equal(ours, expected(name, form, theirs), equal_nan=True):
            return f"{name} differs"
    return None


#: What a model was bound to, as each form states it.
STATED = {
    "window": ("flint.attention.sliding_window", "sliding_window"),
    "context": ("flint.context_length", "max_position_embeddings"),
    "experts_per_token": ("flint.expert_used_count", "num_experts_per_tok"),
    "heads": ("flint.attention.head_count", "num_attention_heads"),
    "eps": ("flint.attention.layer_norm_rms_epsilon", "rms_norm_eps"),
}


def compare_sizes(mutant: Mutant, model: BoundModel) -> str | None:
    """What the model was bound to other than its metadata states; None where nothing."""
    if mutant.form == "gguf":
        fields = gguf.GGUFReader(mutant.path).fields
        stated = {name: fields[key].contents() for name, (key, _) in STATED.items()}
    else:
        config = json.loads((mutant.path / "config.json").read_bytes())
        stated = {name: config[key] for name, (_, key) in STATED.items()}
    bound = {**model.dims, **model.numbers}
    # A GGUF states its numbers in FP32; a spec reads the decimal that was meant.
    stored = np.float32 if mutant.form == "gguf" else float
    return next((f"{n} is {bound[n]}, stated {v}" for n, v in stated.items() if stored(bound[n]) != stored(v)), None)


def main() -> int:
    """Run by command line; exit code 1 where any mutant went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant: to repeat one alone")
    parser.add_argument("--memory", type=float, default=8.0, help="limit on the address space, in GB")
    options = parser.parse_args()
    limit = int(options.memory * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    outcome = fuzz(range(options.first, options.first + options.mutants), options.seed)
    print(table(outcome))
    for number, reason in outcome.wrong:
        print(f"mutant {number}: {reason}", file=sys.stderr)
    return 1 if outcome.wrong else 0


def table(outcome: Outcome) -> str:
    """Counts per class in Markdown."""
    verdicts = ("refused", "loaded", "wrong")
    lines = [
        "| form | part hit | mutants | refused | loaded, equal to other readers | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for form, part in sorted({key[:2] for key in outcome.counts}):
        counts = [outcome.counts[form, part, verdict] for verdict in verdicts]
        lines.append(f"| {form} | {part} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    totals = [sum(n for (_, _, v), n in outcome.counts.items() if v == verdict) for verdict in verdicts]
    lines.append(f"| all | | {sum(totals)} | " + " | ".join(map(str, totals)) + " |")
    lines.append(f"\nStructure hit: {outcome.structural:.1%}. Slowest mutant: {outcome.slowest:.2f} s.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
