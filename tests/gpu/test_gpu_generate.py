"""A trained model on the GPU: as near to FP32 as the reference, and every way to run a sequence gives one text."""

from __future__ import annotations

import inspect
import json.decoder
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import flintc
from flintc import api
from flintc.bench.divergence import Divergence, compare, judge
from flintc.bench.subject import run_prompts
from flintc.checkpoint import open_checkpoint
from flintc.errors import BundleError
from flintc.runtime.cuda.executor import CudaExecutor
from flintc.runtime.model import Model
from flintc.runtime.reference_executor import ReferenceExecutor
from flintc.runtime.storage import make_tables
from flintc.spec import load_spec

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
CHECKPOINTS = {"bf16": EXAMPLE, "nvfp4": EXAMPLE / "tiny-flint.gguf"}
SOURCE = "".join(inspect.getsource(module) for module in (json.decoder, json, textwrap, inspect))
PATH = "cuda, prompt in slices of 8 rows"


def load(weights: str, **options: object) -> Model:
    return flintc.load(CHECKPOINTS[weights], config=EXAMPLE, tokenizer=EXAMPLE, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(weights: str) -> Iterator[Model]:
    model = load(weights)
    assert isinstance(model.executor, CudaExecutor), "a GPU is here, and not the default"
    yield model


@pytest.fixture
def stepping(model: Model) -> Iterator[Model]:
    """The model with prompts in steps, which have the bits of decoding."""
    executor = model.executor
    assert isinstance(executor, CudaExecutor)
    before, executor.shortest_prompt = executor.shortest_prompt, sys.maxsize
    yield model
    executor.shortest_prompt = before


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    ids = model.tokenizer.encode(SOURCE)
    return [ids[i * 230 : i * 230 + 220] for i in range(200)]


def reference_logits(weights: str, numerics: Literal["rounded", "fp32"], prompts: list[list[int]]) -> list[Tensor]:
    """Logits of the op graph run by torch on the CPU, where its many small operations are faster: f32[T, vocab]."""
    checkpoint = open_checkpoint(CHECKPOINTS[weights], EXAMPLE)
    bound = checkpoint.bind(load_spec("flint"))
    graph = api.run_passes(bound, weights, stop_after="baseline").graph
    given = checkpoint.load(graph, bound, "cpu", keep_fp32=numerics == "fp32")
    tables = make_tables(graph, bound, 256, "cpu")
    return run_prompts(ReferenceExecutor(graph, given, tables, numerics, 256, slots=1), prompts)


def logits_in_chunks(model: Model, prompts: list[list[int]], chunk: int) -> list[Tensor]:
    """Logits of all prompts, run in chunks of so many rows; in steps for 0."""
    executor = model.executor
    assert isinstance(executor, CudaExecutor) and executor.general is not None
    before = executor.shortest_prompt, executor.general.chunk
    executor.shortest_prompt, executor.general.chunk = (1, chunk) if chunk else (sys.maxsize, 1)
    try:
        return [model.forward(ids) for ids in prompts]
    finally:
        executor.shortest_prompt, executor.general.chunk = before


@pytest.fixture(scope="module")
def truth(weights: str, prompts: list[list[int]]) -> list[Tensor]:
    """What FP32 makes of all prompts."""
    return reference_logits(weights, "fp32", prompts)


@pytest.fixture(scope="module")
def yardstick(weights: str, truth: list[Tensor], prompts: list[list[int]]) -> Divergence:
    """How far from it the reference with the roundings of the ops is."""
    return compare(truth, reference_logits(weights, "rounded", prompts), prompts)


@pytest.mark.parametrize("chunk", [0, 64, 8192], ids=["steps", "chunks", "whole"])
def test_kl_against_fp32_is_that_of_the_reference(
    chunk: int, model: Model, prompts: list[list[int]], truth: list[Tensor], yardstick: Divergence
) -> None:
    """In steps, in chunks of some rows, and in one chunk."""
    verdict = judge(compare(truth, logits_in_chunks(model, prompts, chunk), prompts), yardstick, prompts)
    assert verdict.passed, verdict.reason


def test_greedy_text_is_the_best_of_each_forward(stepping: Model, prompts: list[list[int]]) -> None:
    made = stepping.generate(prompts[0], max_tokens=40, temperature=0.0, stop_ids=())
    logits = stepping.forward([*prompts[0], *made.token_ids])[len(prompts[0]) - 1 : -1, : stepping.sampled_vocab]
    assert made.token_ids == tuple(logits.argmax(1).tolist())
    expected = logits.double().log_softmax(1).max(1).values
    torch.testing.assert_close(torch.tensor(made.logprobs).double(), expected, atol=2e-6, rtol=0)
    assert made.path == PATH


def test_sampled_text_is_what_the_host_would_sample(stepping: Model, prompts: list[list[int]]) -> None:
    """The sampler in the graph, against the same logits sampled on the CPU."""
    from flintc.runtime.sampling import SamplingParams, sample

    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=77)
    made = stepping.generate(prompts[1], max_tokens=60, temperature=0.9, top_p=0.9, top_k=40, seed=77, stop_ids=())
    start = len(prompts[1])
    logits = stepping.forward([*prompts[1], *made.token_ids])[start - 1 : -1]
    rows = len(made.token_ids)
    want = sample(logits, [params] * rows, list(range(start, start + rows)), stepping.sampled_vocab)
    assert made.token_ids == tuple(want.ids.tolist())


def test_what_the_sampler_cannot_serve_is_chosen_by_torch(stepping: Model, prompts: list[list[int]]) -> None:
    wide = stepping.generate(prompts[2], max_tokens=30, seed=5, top_k=0, stop_ids=())
    assert wide.path == f"{PATH}, tokens chosen by torch"
    narrow = stepping.generate(prompts[2], max_tokens=30, seed=5, top_k=64, top_p=0.5, stop_ids=())
    # Half of the probability lies within far fewer than 64 tokens: the cut at 64 or at 65 makes no difference.
    torches = stepping.generate(prompts[2], max_tokens=30, seed=5, top_k=65, top_p=0.5, stop_ids=())
    assert (narrow.path, torches.path) == (PATH, wide.path)
    assert len(wide.token_ids) == 30


def test_a_batch_gives_each_request_what_it_gets_alone(model: Model, prompts: list[list[int]]) -> None:
    lengths = (220, 3, 64, 65, 66, 1, 100, 17, 40, 8, 9)  # more requests than slots
    batch = [ids[:n] for ids, n in zip(prompts, lengths, strict=False)]
    options = [
        {"seed": i, "max_tokens": 5 + 7 * i % 40, "temperature": (0.0, 1.0, 0.7)[i % 3], "top_k": (20, 0, 5)[i % 4 % 3]}
        for i in range(len(batch))
    ]
    together = model.generate_batch(batch, options)  # type: ignore[arg-type]
    for prompt, own, got in zip(batch, options, together, strict=True):
        assert got == model.generate(prompt, **own)  # type: ignore[arg-type]
    kv = model.executor.kv
    assert kv.fits(kv.context)


def test_a_session_continues_what_is_cached(stepping: Model, prompts: list[list[int]]) -> None:
    options = {"max_tokens": 12, "seed": 3, "stop_ids": ()}
    with stepping.session() as session:
        first = session.generate(prompts[3], **options)  # type: ignore[arg-type]
        longer = [*prompts[3], *first.token_ids, *prompts[4][:50]]
        second = session.generate(longer, **options)  # type: ignore[arg-type]
        assert second.reused == len(prompts[3]) + len(first.token_ids) - 1
        cut = [*longer[:-4], 7, 8]  # within what the windows still hold
        third = session.generate(cut, **options)  # type: ignore[arg-type]
        far = session.generate(prompts[3][:100], **options)  # type: ignore[arg-type]
    assert second.token_ids == stepping.generate(longer, **options).token_ids  # type: ignore[arg-type]
    assert third.token_ids == stepping.generate(cut, **options).token_ids  # type: ignore[arg-type]
    assert (far.reused, far.token_ids) == (0, stepping.generate(prompts[3][:100], **options).token_ids)  # type: ignore[arg-type]


def test_a_stream_may_be_left(model: Model, prompts: list[list[int]]) -> None:
    whole = model.generate(prompts[5], max_tokens=30, seed=4, stop_ids=())
    stream = model.stream(prompts[5], max_tokens=30, seed=4, stop_ids=())
    assert [next(stream).id for _ in range(10)] == list(whole.token_ids[:10])
    stream.close()  # type: ignore[attr-defined]
    again = [token.id for token in model.stream(prompts[5], max_tokens=30, seed=4, stop_ids=())]
    assert again == list(whole.token_ids)


def test_dependent_launch_changes_no_bit(weights: str, model: Model, prompts: list[list[int]]) -> None:
    made = model.executor
    assert isinstance(made, CudaExecutor)
    step = made._step
    given = {n: t for n, t in step.tensors.items() if step.plan.graph.values[n].kind == "weight"}
    tables = {n: t for n, t in step.tensors.items() if step.plan.graph.values[n].kind == "table"}
    code = api._gpu_bundle(None, _bound(weights), weights, None).for_target(api.gpu_target())
    plain = CudaExecutor(step.plan, code, given, tables, 512, 2, pages=128, dependent=False)  # type: ignore[arg-type]
    ids = prompts[6][:40]
    assert torch.equal(Model(plain, model.vocab, model._tokenizer).forward(ids), model.forward(ids))


def _bound(weights: str):  # type: ignore[no-untyped-def]
    return open_checkpoint(CHECKPOINTS[weights], EXAMPLE).bind(load_spec("flint"))


def test_a_bundle_for_another_gpu_is_refused(tmp_path: Path) -> None:
    other = "sm_90" if api.gpu_target() != "sm_90" else "sm_100"
    flintc.compile("tiny-flint", target=other, out=tmp_path / "b")
    with pytest.raises(BundleError, match=f"built for {other}, not for .*--target"):
        flintc.load(EXAMPLE, bundle=tmp_path / "b")


def test_no_compiler_is_loaded(model: Model) -> None:
    """The bundle is compiled and cached by now: a process that loads it needs no Triton."""
    script = f"""
        import sys, flintc
        model = flintc.load({str(EXAMPLE)!r}, device="cuda")
        assert len(model.generate("def f(", max_tokens=5, stop_ids=()).token_ids) == 5
        print([name for name in ("triton", "transformers") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
