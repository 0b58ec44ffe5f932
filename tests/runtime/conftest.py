"""Models with random weights, straight from the spec's defaults: no checkpoint is involved."""

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer as Backend

from flintc.errors import TokenizerError
from flintc.ir.build import build
from flintc.runtime.demo_tokenizer import demo_tokenizer
from flintc.runtime.model import Model
from flintc.runtime.reference_executor import ReferenceExecutor
from flintc.runtime.storage import make_tables
from flintc.runtime.tokenizer import Tokenizer
from flintc.spec import bind_defaults, load_spec

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def random_weights(graph, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for value in graph.values.values():
        if value.kind == "weight":
            noise = torch.randn(value.type.shape, generator=generator)
            scaled = 1 + 0.1 * noise if "norm" in value.name else 0.2 * noise
            weights[value.name] = scaled.to(DTYPES[value.type.dtype])
    return weights


@pytest.fixture(autouse=True)
def only_gpu_tests_find_a_gpu(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("flintc.api.gpu_target", lambda: None)


@pytest.fixture(scope="session")
def tiny():
    """(bound model, graph, weights) of tiny-flint: window 13, pages of 8, context 512."""
    model = bind_defaults(load_spec("tiny-flint"))
    graph = build(model)
    return model, graph, random_weights(graph)


@pytest.fixture(scope="session")
def demo_backend() -> Backend:
    return demo_tokenizer()


@pytest.fixture
def make_model(tiny, demo_backend) -> Callable[..., Model]:
    """A model on the reference backend; ``tokenizer=False`` leaves it without one."""

    def make(numerics="fp32", context=512, slots=8, tokenizer=True, pages=None, weights=None, defaults=None):
        bound, graph, given = tiny
        tables = make_tables(graph, bound, context)
        executor = ReferenceExecutor(graph, weights or given, tables, numerics, context, slots, pages)
        text = Tokenizer(demo_backend) if tokenizer else TokenizerError("no tokenizer here")
        return Model(executor, bound.dims["vocab"], text, defaults)

    return make


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of its own that shares the compiled kernels."""
    from flintc.codegen import cache

    (tmp_path / "kernels").symlink_to(cache.cache_root() / "kernels")
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path))
    return tmp_path
