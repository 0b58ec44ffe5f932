"""Who gets a token in which step when more requests are under way than a fast step has rows."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_ahead import Ahead, same

from flintc import api
from flintc.bench import decode
from flintc.bench.synthetic import tensors
from flintc.cli.bench import numbers
from flintc.errors import UsageError
from flintc.ir.build import build
from flintc.runtime.batch import run_requests
from flintc.runtime.executor import WideExecutor, turns
from flintc.runtime.model import Model
from flintc.spec import bind_defaults, load_spec

FAST, WIDE_FROM, WIDE = 8, 13, 64


class Waiting:
    """A reference executor with wide steps, which writes down how many rows each decoding step has."""

    path, rows = "waiting", FAST

    def __init__(self, inner, wide=WIDE, wide_from=WIDE_FROM):
        self.inner, self.kv, self.wide, self.wide_from, self.log = inner, inner.kv, wide, wide_from, []

    def step(self, ids, positions, seqs, *, logits_rows):
        if len(logits_rows) == len(set(seqs)) == len(seqs):
            self.log.append(tuple(seqs))
        return self.inner.step(ids, positions, seqs, logits_rows=logits_rows)


class WideAhead(Ahead):
    """The same as a GPU does it, a step ahead."""

    def __init__(self, inner, wide=WIDE, wide_from=WIDE_FROM):
        super().__init__(inner)
        self.rows, self.wide, self.wide_from, self.log = FAST, wide, wide_from, []

    def choose(self, ids, positions, seqs, params, vocab):
        if len(set(seqs)) == len(seqs):
            self.log.append(tuple(seqs))
        return super().choose(ids, positions, seqs, params, vocab)


@pytest.fixture(scope="module")
def tiny():
    """Fewer layers than the models of the other tests: there are many requests here."""
    bound = bind_defaults(load_spec(Path(__file__).parents[1] / "data" / "short-flint.yaml"))
    graph = build(bound)
    made = tensors(graph, {"B": 1, "Q": 1, "T": 1, "P": 1, "C": 1}, 1e4, "cpu", 0)
    return bound, graph, {name: t for name, t in made.items() if graph.values[name].kind == "weight"}


@pytest.fixture(params=[Waiting, WideAhead])
def make(request, make_model):
    """(slots, options) -> (a model that runs requests alone, one with wide steps)"""

    def pair(slots, **options):
        plain, inner = make_model("rounded", slots=1), make_model("rounded", slots=slots)
        plain.executor.rows = FAST  # prompts are cut as here
        return plain, Model(request.param(inner.executor, **options), inner.vocab, inner._tokenizer)

    return pair


def prompts(count):
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 256, (1 + 3 * i % 8,), generator=generator).tolist() for i in range(count)]


def alone(plain, batch, options):
    return [plain.generate(ids, **own) for ids, own in zip(batch, options, strict=True)]


def test_twenty_requests_get_what_they_get_alone(make):
    """They begin one after the other and end at various lengths, some of them by a stop id, greedy and sampled."""
    plain, model = make(20)
    assert isinstance(model.executor, WideExecutor)
    batch = prompts(20)
    options = [{"max_tokens": 26 + i % 7, "seed": i, "temperature": i % 3 * 0.5, "top_k": 5 + i} for i in range(20)]
    for i in range(0, 20, 5):
        options[i] |= {"stop_ids": (plain.generate(batch[i], **options[i]).token_ids[22],)}
    for ours, theirs in zip(model.generate_batch(batch, options), alone(plain, batch, options), strict=True):
        assert same(ours, theirs)
    sizes = [len(seqs) for seqs in model.executor.log]
    assert max(sizes) == 20 and min(sizes) == 1
    assert not any(FAST < size < WIDE_FROM for size in sizes), sizes
    assert sorted(set(sizes) - set(range(FAST + 1))) == sorted(set(sizes) & set(range(WIDE_FROM, 21)))
    assert model.executor.kv.fits(512) and len(model.executor.kv._free_slots) == 20


def test_too_few_for_a_wide_step_wait_for_one_of_the_eight_to_end(make):
    plain, model = make(20)
    batch = prompts(11)
    options = [{"max_tokens": 14 + 2 * i, "seed": i, "stop_ids": ()} for i in range(11)]
    for ours, theirs in zip(model.generate_batch(batch, options), alone(plain, batch, options), strict=True):
        assert same(ours, theirs)
    assert max(len(seqs) for seqs in model.executor.log) == FAST
    full = [set(seqs) for seqs in model.executor.log if len(seqs) == FAST]
    assert all(len(a & b) >= FAST - 1 for a, b in pairwise(full)), "a place is kept to the end"


def test_steps_go_on_a_step_ahead_while_others_wait(make_model):
    inner = make_model("rounded", slots=20)
    executor = WideAhead(inner.executor)
    model = Model(executor, inner.vocab, inner._tokenizer)
    for count in (10, 14):
        executor.chained = 0
        model.generate_batch(prompts(count), max_tokens=30, seed=1, stop_ids=())
        assert executor.chained > 20, count
        assert executor.most_ahead == 2


def test_as_many_wait_as_the_widest_step_has_no_room_for(make):
    _, model = make(18, wide=16)
    made = model.generate_batch(prompts(18), max_tokens=24, temperature=0.0, stop_ids=())
    assert [len(one.token_ids) for one in made] == [24] * 18
    assert max(len(seqs) for seqs in model.executor.log) == 16


def test_a_batch_that_is_left_gives_all_slots_back(make):
    _, model = make(20)
    requests = [model.request(ids, {"max_tokens": 40, "seed": 1, "stop_ids": ()}) for ids in prompts(20)]
    events = run_requests(model.executor, requests, None)
    while len(model.executor.log) == 0 or len(model.executor.log[-1]) < 18:
        next(events)
    events.close()
    assert len(model.executor.kv._free_slots) == 20


@pytest.mark.parametrize(
    ("wide", "waiting", "want"),
    [
        (0, 0, []),
        (0, 20, [8, 8, 4]),
        (64, 0, []),
        (64, 3, [3]),
        (64, 8, [8]),
        (64, 12, [8]),
        (64, 13, [13]),
        (64, 64, [64]),
        (64, 70, [64]),
        (16, 20, [16]),
    ],
)
def test_turns(make_model, wide, waiting, want):
    executor = Waiting(make_model().executor, wide=wide)
    steps = list(turns(executor, waiting))
    assert [len(rows) for rows in steps] == want
    assert [row for rows in steps for row in rows] == list(range(sum(want)))


def test_executors_without_wide_steps_serve_all_in_groups(make_model):
    executor = make_model(slots=20).executor
    executor.rows = 8
    assert not isinstance(executor, WideExecutor)
    assert [len(rows) for rows in turns(executor, 20)] == [8, 8, 4]


def test_slots_are_at_least_one(tmp_path):
    api.synth("tiny-flint", tmp_path / "tiny")
    assert api.load(tmp_path / "tiny", backend="reference", slots=20).executor.kv.slots == 20
    with pytest.raises(UsageError, match="slots is 0"):
        api.load(tmp_path / "tiny", backend="reference", slots=0)


def test_the_benchmark_of_decoding_counts_what_steps_serve(make_model, monkeypatch):
    """Its sequences have room for just the steps that it makes, the one ahead among them."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    executor = WideAhead(make_model("rounded", slots=14, context=64).executor)
    executor.vocab = 256
    for one in executor.kv.layout.caches:
        executor.inner._storage.tensors[one.name].normal_()
    monkeypatch.setattr(
        executor.inner._storage, "_empty", lambda cache, pages: torch.randn(pages, *cache.page_shape).bfloat16()
    )
    for requests, served in ((1, 1), (8, 8), (9, 8), (13, 13)):
        found = decode._measure(executor, requests, 3)
        assert (found.requests, found.served, found.wide) == (requests, served, served > FAST)
        assert found.tokens_per_second == pytest.approx(served / found.ms * 1e3)
        assert len(executor.kv._free_slots) == 14


def test_numbers_of_an_option():
    assert numbers("--batches", "8,16") == [8, 16]
    for text in ("8,x", "", "8,0"):
        with pytest.raises(UsageError, match="--batches"):
            numbers("--batches", text)
