"""Wide steps on the GPU: the trained tiny-flint beside its fast steps, and layers of Flint's widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flintc
from flintc import api
from flintc.bench.decode import measure_decode
from flintc.bench.synthetic import tensors
from flintc.codegen.aot import compile_kernels
from flintc.codegen.general import general
from flintc.ir.build import Weights
from flintc.ir.plan import Plan
from flintc.reference import run
from flintc.runtime.batch import run_requests
from flintc.runtime.cuda.executor import CudaExecutor
from flintc.runtime.cuda.wide import WIDE_FROM
from flintc.runtime.executor import prefill
from flintc.runtime.generation import Options
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.model import Model
from flintc.runtime.prefill.launch import CudaLaunch
from flintc.runtime.prefill.path import GeneralPath
from flintc.runtime.prefill.steps import StepRows, counters_of
from flintc.runtime.storage import KvStorage
from flintc.runtime.values import for_kernels
from flintc.spec import BoundModel, load_spec
from flintc.spec.bound import bind

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
CHECKPOINTS = {"bf16": EXAMPLE, "nvfp4": EXAMPLE / "tiny-flint.gguf"}
#: As many as wide steps of either format begin at.
SLOTS = max(WIDE_FROM.values())


@pytest.fixture(scope="module", params=CHECKPOINTS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    loaded = flintc.load(CHECKPOINTS[request.param], config=EXAMPLE, tokenizer=EXAMPLE, slots=SLOTS)
    assert isinstance(loaded.executor, CudaExecutor) and loaded.executor.wide == SLOTS
    loaded.executor.wide_from = 9
    yield loaded


def texts(model: Model, count: int) -> list[list[int]]:
    """Prompts of 3 to 140 tokens, from different places of a text."""
    ids = model.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    return [ids[37 * i : 37 * i + 3 + 41 * i % 138] for i in range(count)]


def divergence(want: Tensor, got: Tensor) -> Tensor:
    a, b = want.log_softmax(-1), got.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


class Step:
    """Sequences that hold all of their texts but the last token, and the step of that."""

    def __init__(self, model: Model, count: int) -> None:
        assert isinstance(model.executor, CudaExecutor)
        self.executor = model.executor
        self.ids, self.positions, self.slots = [], [], []
        for text in texts(model, count):
            slot = self.executor.kv.add(len(text))
            list(prefill(self.executor, slot, text[:-1]))
            self.ids.append(text[-1])
            self.positions.append(self.executor.kv.extend(slot, 1).start)
            self.slots.append(slot)

    def logits(self, rows: Sequence[int], ids: Sequence[int] | None = None) -> Tensor:
        """Of the rows ``rows`` in one step, with other tokens where ``ids`` are given."""
        own = [self.ids[r] for r in rows] if ids is None else ids
        positions, slots = [self.positions[r] for r in rows], [self.slots[r] for r in rows]
        return self.executor.step(own, positions, slots, logits_rows=range(len(rows)))

    def close(self) -> None:
        for slot in self.slots:
            self.executor.kv.finish(slot)


@pytest.fixture(params=[9, 16, 30, 40])
def step(model: Model, request: pytest.FixtureRequest) -> Iterator[Step]:
    made = Step(model, request.param)
    yield made
    made.close()


def test_a_wide_step_gives_what_fast_steps_give(step: Step) -> None:
    """And fast steps what they gave before."""
    rows = range(len(step.ids))

    def fast() -> Tensor:
        return torch.cat([step.logits(rows[i : i + 8]) for i in range(0, len(rows), 8)])

    before, wide = fast(), step.logits(rows)
    assert wide.isfinite().all()
    assert divergence(before, wide).mean() < 1e-3
    assert torch.equal(fast(), before)


def test_replays_have_equal_bits_and_rows_do_not_see_each_other(step: Step) -> None:
    """Although experts group their rows in another order each time."""
    rows = list(range(len(step.ids)))
    first = step.logits(rows)
    for _ in range(50):
        assert torch.equal(step.logits(rows), first)
    other = [(i + 7) % 300 for i in step.ids]
    other[3] = step.ids[3]
    assert torch.equal(step.logits(rows, other)[3], first[3])
    order = rows[::-1]
    assert torch.equal(step.logits(order)[order], first)


def test_rows_of_no_sequence_leave_everything_alone(model: Model) -> None:
    executor = model.executor
    assert isinstance(executor, CudaExecutor) and executor._wide is not None
    step = executor._wide.step
    before = {name: cache.view(torch.int16).clone() for name, cache in executor.caches.items()}
    for width in step.batches:
        executor._wide.upload(torch.tensor([[5], [9], [-1]], dtype=torch.int32).repeat(1, step.batches[-1]))
        step.replay(width, "tokens")
        assert step.tensors["ids"].tolist() == [5] * 64 and step.tensors["positions"].tolist() == [9] * 64  # type: ignore[union-attr]
    for name, cache in executor.caches.items():
        assert torch.equal(cache.view(torch.int16), before[name]), name


def test_many_requests_at_once(model: Model) -> None:
    """They begin and end one after the other; every token is as likely as the same text says in chunks."""
    executor = model.executor
    assert isinstance(executor, CudaExecutor)
    batch = texts(model, 30)
    each: list[Options] = [
        {"max_tokens": 50 + i, "seed": i, "temperature": i % 3 / 2, "top_k": (20, 5, 0)[i % 3], "stop_ids": ()}
        for i in range(30)
    ]
    made = model.generate_batch(batch, each)
    assert model.generate_batch(batch, each) == made, "the same requests, the same steps, the same bits"
    for prompt, one in zip(batch, made, strict=True):
        again = model.logprobs([*prompt, *one.token_ids])[len(prompt) - 1 :]
        assert (again - torch.tensor(one.logprobs)).abs().mean() < 0.05
    assert len(executor.kv._free_slots) == SLOTS


def test_up_to_eight_requests_get_what_a_model_of_eight_slots_gives(model: Model) -> None:
    executor = model.executor
    assert isinstance(executor, CudaExecutor)
    batch = texts(model, 8)
    each: list[Options] = [{"max_tokens": 30, "seed": i, "stop_ids": ()} for i in range(8)]
    made = model.generate_batch(batch, each)
    assert [model.generate(ids, **own) for ids, own in zip(batch, each, strict=True)] == made


def test_a_batch_may_be_left(model: Model) -> None:
    requests = [model.request(ids, {"max_tokens": 60, "seed": 1, "stop_ids": ()}) for ids in texts(model, 20)]
    events = run_requests(model.executor, requests, model.sampled_vocab)
    for _ in range(300):
        next(events)
    events.close()
    assert model.generate(texts(model, 1)[0], max_tokens=5, seed=1, stop_ids=()).finish_reason == "length"


def four_layers(experts: bool) -> BoundModel:
    """Four layers of Flint's widths, the last two with experts or all dense."""
    model = api._resized(load_spec("flint"), {"layers": 4})
    if experts:
        return model
    sets = {**model.layer_sets, "dense": frozenset(range(4))}
    return bind(model.spec, model.dims, {}, sets)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_layers_of_full_width_against_the_reference(weights: Weights, experts: bool) -> None:
    """Four layers of Flint: sequences around pages, the window and where runs begin, and padded rows.

    A row of 2048 has as many chunks as it may have partials, one of 2049 has more.
    """
    lengths, context = (1, 2, 64, 65, 512, 513, 514, 577, 1000, 1024, 2048, 2049, 8192, 8193, 9000), 9216
    graph = api.run_passes(four_layers(experts), weights, stop_after="baseline").graph
    made, target = general(graph), api.gpu_target()
    assert made is not None and target is not None
    compiled = {name: c for (name, _), c in compile_kernels(made.kernels.values(), [target]).items()}
    kv = KvCache(KvLayout.from_graph(graph), context, len(lengths))
    storage = KvStorage(kv, torch.bfloat16, "cuda", whole=True)
    for cache in storage.tensors.values():
        cache.normal_(generator=torch.Generator("cuda").manual_seed(3))
    sizes = {"B": 1, "Q": 1, "T": 1, "P": 1, "C": context}
    fixed = {
        n: t for n, t in tensors(graph, sizes, 1e4, "cuda", 0).items() if graph.values[n].kind in ("weight", "table")
    }
    plan = Plan(graph, {}, (), {}, {}, {}, general=made)
    path = GeneralPath(plan, CudaLaunch(made.kernels, compiled), {**for_kernels(fixed), **storage.tensors}, kv)
    slots = [kv.add(context) for _ in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        kv.extend(slot, length, sliced=False)
    tables = {name: table.to("cuda") for name, table in kv.tables.items()}
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros((3, 16), dtype=torch.int32)
    rows[2] = -1
    live = len(lengths)
    rows[0, :live] = torch.randint(0, 150_000, (live,), generator=generator, dtype=torch.int32)
    rows[1, :live] = torch.tensor(lengths, dtype=torch.int32) - 1
    rows[2, :live] = torch.tensor(slots, dtype=torch.int32)
    ids, positions, seqs = rows.to("cuda")
    counters = torch.zeros(counters_of(made, 16), dtype=torch.int32, device="cuda")
    caches = {name: cache.clone() for name, cache in storage.tensors.items()}
    got = path.step(StepRows(ids, positions, seqs, tables, counters))
    assert not counters.any()
    inputs = {"ids": ids, "positions": positions, "seqs": seqs}
    want = run(graph, {**fixed, **caches, **tables, **inputs})[graph.outputs[0]]
    kl = divergence(want[:live], got[:live])
    if experts:
        # A synthetic model chooses among experts at random: rounding turns the choice of some rows, never of most.
        assert kl.median() < 1e-3 and kl.mean() < 0.05, kl
    else:
        assert kl.max() < 1e-3, kl


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_decoding_is_timed(weights: str) -> None:
    found = measure_decode("tiny-flint", weights, None, 256, (1, 8, 9, 12, 24, 40), 20, wide_from=12)
    assert [(t.served, t.wide) for t in found.times] == [
        (1, False), (8, False), (8, False), (12, True), (24, True), (40, True)
    ]  # fmt: skip
    assert all(t.tokens_per_second == pytest.approx(t.served / t.ms * 1e3) for t in found.times)
