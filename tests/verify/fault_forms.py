"""The checkpoints that the faults need, made from a folder of safetensors and the GGUF file of the same model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from faults import Form, op
from safetensors.torch import load_file, save_file
from torch import Tensor

from flintc.bench.subject import open_subject

#: Logits that the routers of ``low-scores`` are shifted to, roughly: their sigmoids are about 1e-11.
LOW = -25.0


def make_form(form: Form, folder: Path, file: Path, out: Path, prompts: Sequence[Sequence[int]], spec: str) -> Path:
    """The checkpoint of ``form``; new ones go into the folder ``out``."""
    if form == "bf16":
        return folder
    if form == "nvfp4":
        return file
    if form == "nvfp4-7f":
        return _with_7f(file, out / "7f.gguf")
    return _low_scores(folder, out / "low-scores", prompts, spec)


def _with_7f(file: Path, target: Path) -> Path:
    """A hundredth of the block scales of every value projection set to 0x7F, which stands for zero."""
    content = bytearray(file.read_bytes())
    generator = np.random.default_rng(0)
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name.endswith("attn_v.weight"):
            blocks = generator.choice(tensor.n_bytes // 36, max(1, tensor.n_bytes // 36 // 25), replace=False)
            for block in blocks.tolist():
                content[int(tensor.data_offset) + 36 * block] = 0x7F
    target.write_bytes(content)
    return target


def _low_scores(folder: Path, target: Path, prompts: Sequence[Sequence[int]], spec: str) -> Path:
    """Routers whose logits are all near LOW: a direction that every token shares is added to the embedding, and its
    projection subtracted by each router."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.gguf", "*.py", "__pycache__"))
    path = target / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    embed = weights["model.embed_tokens.weight"]
    embed[:, 0] += 6 * embed.float().square().mean().sqrt().to(embed.dtype)
    save_file(weights, path, metadata={"format": "pt"})
    for name, states in _router_inputs(target, prompts, spec).items():
        shared = torch.linalg.lstsq(states, torch.ones(len(states), 1)).solution[:, 0]
        weights[name] = (weights[name].float() + LOW * shared).to(torch.float32)
    save_file(weights, path, metadata={"format": "pt"})
    return target


def _router_inputs(folder: Path, prompts: Sequence[Sequence[int]], spec: str) -> dict[str, Tensor]:
    """What each router reads, by the published name of its weight."""
    subject = open_subject(folder, spec=spec)
    graph = subject.graph("baseline")
    routers = [o for o in graph.ops.values() if o.kind == "router"]
    seen: list[Tensor] = []

    def watch(right: Any, context: Any, x: Tensor, weight: Tensor) -> Any:
        seen.append(x.float())
        return right(context, x, weight)

    with op("router", watch):
        subject.logits("reference", prompts)
    return {
        f"model.layers.{router.layer}.mlp.gate.weight": torch.cat(seen[i :: len(routers)])
        for i, router in enumerate(routers)
    }
