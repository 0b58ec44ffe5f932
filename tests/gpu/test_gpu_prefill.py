"""Prompts in chunks on the GPU: the trained tiny-flint, and layers of Flint's own widths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flintc
from flintc import api
from flintc.bench.prefill import PrefillBench
from flintc.codegen.aot import compile_kernels
from flintc.codegen.general import general
from flintc.ir.build import Weights
from flintc.ir.plan import Plan
from flintc.reference import run
from flintc.runtime.cuda.executor import SHORTEST_PROMPT, CudaExecutor
from flintc.runtime.generation import Options
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.model import Model
from flintc.runtime.prefill.memory import chunk_bytes
from flintc.runtime.storage import KvStorage
from flintc.spec import load_spec

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
CHECKPOINTS = {"bf16": EXAMPLE, "nvfp4": EXAMPLE / "tiny-flint.gguf"}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield flintc.load(CHECKPOINTS[request.param], config=EXAMPLE, tokenizer=EXAMPLE)


@pytest.fixture(scope="module")
def ids(model: Model) -> list[int]:
    text = Path(__file__).read_text(encoding="utf-8")
    return model.tokenizer.encode(text)[: model.context - 60]


def in_chunks_of(model: Model, chunk: int) -> None:
    assert isinstance(model.executor, CudaExecutor) and model.executor.general is not None
    model.executor.general.chunk = chunk


def divergence(want: Tensor, got: Tensor) -> Tensor:
    a, b = want.log_softmax(-1), got.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


def test_a_prompt_has_the_same_bits_every_time(model: Model, ids: list[int]) -> None:
    """Although the rows of an expert come in another order each time."""
    first = model.forward(ids)
    for _ in range(10):
        assert torch.equal(model.forward(ids), first)


@pytest.mark.parametrize("chunk", [32, 100, 128])
def test_chunks_give_what_one_chunk_gives(model: Model, ids: list[int], chunk: int) -> None:
    whole = model.forward(ids)
    in_chunks_of(model, chunk)
    try:
        assert divergence(whole, model.forward(ids)).mean() < 2e-4
    finally:
        in_chunks_of(model, 8192)


def test_decoding_goes_on_from_what_chunks_left(model: Model, ids: list[int]) -> None:
    options: Options = {"max_tokens": 40, "temperature": 0.0, "stop_ids": ()}
    made = model.generate(ids, **options)
    assert made.path == "cuda, prompt in chunks of 8192 rows"
    executor = model.executor
    assert isinstance(executor, CudaExecutor)
    executor.shortest_prompt = 1 << 30
    try:
        logprobs = model.logprobs([*ids, *made.token_ids])[len(ids) - 1 :]
        assert model.generate(ids, **options).path == "cuda, prompt in slices of 8 rows"
    finally:
        executor.shortest_prompt = SHORTEST_PROMPT
    assert (logprobs - torch.tensor(made.logprobs)).abs().mean() < 0.02


def test_log_probabilities_are_those_of_forward(model: Model, ids: list[int]) -> None:
    logits = model.forward(ids)[:-1, : model.sampled_vocab].log_softmax(-1)
    want = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(model.logprobs(ids), want, atol=1e-5, rtol=0)


def test_requests_get_what_they_get_alone_while_prompts_arrive(model: Model, ids: list[int]) -> None:
    """Long and short prompts between each other's steps, in chunks that others decode between."""
    in_chunks_of(model, 64)
    lengths = (300, 20, SHORTEST_PROMPT, 180, SHORTEST_PROMPT + 1, 5, 250, 9, 130, 64)
    batch = [ids[i : i + n] for i, n in enumerate(lengths)]
    options: list[Options] = [{"seed": i, "max_tokens": 8 + 5 * i, "stop_ids": ()} for i in range(len(batch))]
    try:
        for prompt, own, got in zip(batch, options, model.generate_batch(batch, options), strict=True):
            assert got == model.generate(prompt, **own)
    finally:
        in_chunks_of(model, 8192)


@pytest.mark.parametrize(
    ("weights", "tokens", "chunk"), [("nvfp4", 700, 300), ("bf16", 600, 256), ("nvfp4", 2100, 2100)]
)
def test_wide_layers_against_the_reference(weights: Weights, tokens: int, chunk: int) -> None:
    """Four layers of Flint's full width: every kernel at the sizes it is made for."""
    bound = api._resized(load_spec("flint"), {"layers": 4})
    graph = api.run_passes(bound, weights, stop_after="baseline").graph
    made = general(graph)
    assert made is not None
    target = api.gpu_target()
    assert target is not None
    compiled = {name: c for (name, _), c in compile_kernels(made.kernels.values(), [target]).items()}
    bench = PrefillBench(Plan(graph, {}, (), {}, {}, {}, general=made), compiled, tokens, chunk, 10000.0)
    ids = torch.randint(0, 150_000, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    slot = bench.kv.add(tokens)
    got = torch.cat([part for hidden in bench.path.chunks(slot, ids) for part in bench.path.logits(hidden)])
    bench.kv.cut(slot, 0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    list(bench.path.chunks(slot, ids))
    used = torch.cuda.max_memory_allocated() - before
    assert used <= chunk_bytes(graph, made, chunk, tokens) + (4 << 20), "what is set aside for a chunk does not do"
    kl = divergence(_reference(bench, ids), got)
    # A synthetic model chooses among experts at random, so that rounding turns some choices.
    assert kl.quantile(0.8) < 4e-3 and kl.mean() < 0.02, (kl.mean(), kl.max())


def _reference(bench: PrefillBench, ids: list[int]) -> Tensor:
    """Logits of the op graph run by torch on the GPU, all rows at once."""
    graph, count = bench.graph, len(ids)
    kv = KvCache(KvLayout.from_graph(graph).with_rows(count), count, 1)
    storage = KvStorage(kv, torch.bfloat16, "cuda", whole=True)
    positions = kv.extend(kv.add(count), count)
    rows = {"ids": ids, "positions": list(positions), "seqs": [0] * count}
    inputs = {name: torch.tensor(column, dtype=torch.int32, device="cuda") for name, column in rows.items()}
    tables = {name: table.to("cuda") for name, table in kv.tables.items()}
    fixed = {n: t for n, t in bench.given.items() if graph.values[n].kind in ("weight", "table")}
    return run(graph, {**fixed, **storage.tensors, **tables, **inputs})[graph.outputs[0]]
