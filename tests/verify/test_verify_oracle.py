"""The oracle of verify: bit for bit what transformers computes from the same files, with nothing of flintc in it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_gguf import Flint

from flintc import api
from flintc.bench import oracle


def test_imports_nothing_of_flintc() -> None:
    source = Path(oracle.__file__)
    for node in ast.walk(ast.parse(source.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] == "flintc" for name in names)
        assert not (isinstance(node, ast.ImportFrom) and node.level)
    loaded = (
        f"import importlib.util as u, sys; s = u.spec_from_file_location('oracle', {str(source)!r});"
        "m = u.module_from_spec(s); s.loader.exec_module(m);"
        "sys.exit(any(n.split('.')[0] == 'flintc' for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_by_layer_is_the_whole_model(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import FlintForCausalLM

    path = tmp_path / "model"
    api.synth("tiny-flint", path)
    whole = FlintForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    prompts = [list(range(40)), list(range(7, 27))]
    with torch.no_grad():
        expected = [whole(torch.tensor([ids])).logits[0].float() for ids in prompts]
    got = oracle.Oracle(path).logits(prompts, dtype)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_gguf_is_what_package_gguf_dequantises(tmp_path: Path) -> None:
    flint = Flint(2)
    flint.write(tmp_path / "flint.gguf")
    ids = [i % flint.config.vocab_size for i in range(40)]
    with torch.no_grad():
        expected = flint.oracle()(torch.tensor([ids])).logits[0]
    assert torch.equal(oracle.Oracle(tmp_path / "flint.gguf").logits([ids], torch.float32)[0], expected)
