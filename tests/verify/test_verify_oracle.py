"""The oracle of verify: bit for bit what transformers computes from the same files, with nothing of flintc in it."""

from __future__ import annotations

import ast
import subprocess
import sys
import weakref
from pathlib import Path

import gguf
import numpy as np
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
    got = oracle.Oracle(path).logits(prompts, [dtype])
    assert all(torch.equal(g, e) for (g,), e in zip(got, expected, strict=True))


def test_gguf_is_what_package_gguf_dequantises(tmp_path: Path) -> None:
    flint = Flint(2)
    flint.write(tmp_path / "flint.gguf")
    ids = [i % flint.config.vocab_size for i in range(40)]
    with torch.no_grad():
        expected = flint.oracle()(torch.tensor([ids])).logits[0]
    ((got,),) = oracle.Oracle(tmp_path / "flint.gguf").logits([ids], [torch.float32])
    assert torch.equal(got, expected)


class Watched:
    """A reader that remembers what it was asked for, and knows how much of that is still in memory."""

    def __init__(self, read: oracle.Reader) -> None:
        self.read, self.names, self.most = read, list[str](), 0
        self._held: list[tuple[str, weakref.ref[torch.UntypedStorage], int]] = []

    def __call__(self, name: str) -> torch.Tensor:
        self.names.append(name)
        tensor = self.read(name)
        self._held.append((name, weakref.ref(tensor.untyped_storage()), tensor.nbytes))
        self.most = max(self.most, sum(n for _, alive, n in self._held if alive() is not None))
        return tensor

    def live(self) -> set[str]:
        """Names of the weights that are still in memory as they were read."""
        return {name for name, alive, _ in self._held if alive() is not None}


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_one_layer_and_one_prompt_in_memory_at_a_time(form: str, tmp_path: Path) -> None:
    """Ten layers of one size and a small vocabulary: what is held at once is a layer of them, read once."""
    sizes = {"layers": 10, "vocab": 64, "experts": 4}
    path = tmp_path / ("model.gguf" if form == "gguf" else "model")
    api.synth("tiny-flint", path, format=form, sizes=sizes)
    reading = oracle.Oracle(path)
    reading._read = watched = Watched(reading._read)
    layers: list[int] = []
    layer = reading._layer

    def counted(number: int, *rest: object) -> torch.nn.Module:
        assert {name.split(".")[2] for name in watched.live() if ".layers." in name} == {str(number)}
        assert all(earlier() is None for earlier in made), "the layer before is still there"
        one = layer(number, *rest)  # type: ignore[arg-type]
        made.append(weakref.ref(one))
        layers.append(number)
        return one

    made: list[weakref.ref] = []
    reading._layer = counted  # type: ignore[method-assign]
    dtypes = (torch.float32, torch.bfloat16)
    logits = reading.logits([[1, 2, 3], [4, 5]], dtypes)
    first = next(logits)
    assert [x.shape for x in first] == [(3, 64)] * 2
    assert layers == [n for n in range(10) for _ in dtypes]
    assert len(watched.names) == len(set(watched.names))
    held = [weakref.ref(x) for x in first]
    del first
    second = next(logits)
    assert [x.shape for x in second] == [(2, 64)] * 2 and all(x() is None for x in held)
    whole = sum(n for _, _, n in watched._held)
    assert watched.most < 0.2 * whole


def test_a_tensor_is_dequantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and experts by several threads, more or fewer than there are rows: the same values."""
    api.synth("tiny-flint", tmp_path / "model.gguf", format="gguf", sizes={"layers": 3, "experts": 5})
    tensors = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert {t.tensor_type.name for t in tensors} >= {"NVFP4", "BF16", "F32"}
    for workers in (1, 3, 1000):
        monkeypatch.setattr("os.cpu_count", lambda n=workers: n)
        for tensor in tensors:
            whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(oracle._dequantized(tensor), whole), tensor.name
