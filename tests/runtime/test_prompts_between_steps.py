"""Prompts in chunks among requests that decode: who waits for whom, and that nobody's tokens change."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flintc.runtime.batch import run_requests
from flintc.runtime.executor import PromptExecutor, logits_of, path_of, slices
from flintc.runtime.model import Model

CHUNK = 6


class Chunked:
    """A reference executor with a path for prompts, which writes down what it is asked for."""

    path, prompt_path, rows = "steps", "chunks", 8

    def __init__(self, inner):
        self.inner, self.kv, self.log, self.newest = inner, inner.kv, [], None

    def step(self, ids, positions, seqs, *, logits_rows):
        self.log.append(f"step {len(ids)}")
        self.newest = None
        return self.inner.step(ids, positions, seqs, logits_rows=logits_rows)

    def serves(self, params):
        return True

    def choose(self, ids, positions, seqs, params, vocab):
        from flintc.runtime.sampling import SamplingParams, sample

        if ids is None:
            ids = self.last
        logits = self.step(ids, positions, seqs, logits_rows=range(len(ids)))
        made = sample(logits, [p or SamplingParams(temperature=0.0) for p in params], [p + 1 for p in positions], vocab)
        self.last = made.ids.tolist()
        self.newest = Done(made)
        return self.newest

    def goes_on(self, choice):
        return choice is self.newest

    def takes(self, tokens):
        return tokens >= CHUNK

    def prompt(self, slot, ids):
        for start in range(0, len(ids), CHUNK):
            self.log.append(f"chunk {len(ids[start : start + CHUNK])}")
            for part, positions in slices(self.inner, slot, ids[start : start + CHUNK]):
                made = self.inner.step(part, positions, [slot] * len(part), logits_rows=range(len(part)))
            yield made

    def logits(self, hidden):
        yield from hidden.split(2)


class Done:
    def __init__(self, made):
        self.made = made

    def wait(self):
        return self.made


@pytest.fixture
def pair(make_model):
    plain, inner = make_model("fp32"), make_model("fp32")
    return plain, Model(Chunked(inner.executor), inner.vocab, inner._tokenizer)


def prompt(length, seed=0):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_it_is_a_prompt_executor(pair):
    assert isinstance(pair[1].executor, PromptExecutor) and not isinstance(pair[0].executor, PromptExecutor)


def test_a_long_prompt_delays_the_others_by_a_chunk_at_most(pair):
    _, model = pair
    requests = [model.request(prompt(3), {"max_tokens": 12, "seed": 1, "stop_ids": ()})]
    requests.append(model.request(prompt(5 * CHUNK + 1), {"max_tokens": 2, "seed": 2, "stop_ids": ()}))
    events = list(run_requests(model.executor, requests, model.sampled_vocab))
    log = model.executor.log
    first, last = log.index(f"chunk {CHUNK}"), len(log) - 1 - log[::-1].index(f"chunk {CHUNK}")
    between = log[first : last + 1]
    assert between.count(f"chunk {CHUNK}") == 5
    assert all(a.startswith("step") or b.startswith("step") for a, b in pairwise(between)), log
    # The first request had tokens while the prompt of the second was under way.
    own = [e.request for e in events]
    assert own.index(1) > 4


def test_everybody_gets_what_they_get_alone(pair):
    _, model = pair
    lengths = (3, 40, CHUNK, CHUNK + 1, 25, 2, 9, 60, 14, 7)
    batch = [prompt(n, seed=n) for n in lengths]
    options = [{"seed": i, "max_tokens": 3 + 2 * i, "stop_ids": ()} for i in range(len(batch))]
    made = model.generate_batch(batch, options)
    for ids, own, got, n in zip(batch, options, made, lengths, strict=True):
        assert got == model.generate(ids, **own)
        assert got.path == ("chunks" if n > CHUNK else "steps")
    assert model.executor.kv.fits(model.context)


def test_a_request_that_is_left_gives_its_slot_back(pair):
    _, model = pair
    requests = [
        model.request(prompt(4), {"max_tokens": 50, "stop_ids": ()}),
        model.request(prompt(90), {"max_tokens": 2}),
    ]
    events = run_requests(model.executor, requests, model.sampled_vocab)
    next(events)
    next(events)
    events.close()
    assert model.executor.kv.fits(model.context)
    assert len(model.executor.kv._free_slots) == model.executor.kv.slots


def test_logits_and_log_probabilities_come_in_pieces(pair):
    plain, model = pair
    ids = prompt(20)
    want = plain.forward(ids)
    torch.testing.assert_close(model.forward(ids), want, atol=1e-4, rtol=0)
    slot = model.executor.kv.add(len(ids))
    assert max(len(part) for part in logits_of(model.executor, slot, ids)) == 2
    model.executor.kv.finish(slot)
    scores = want[:, : model.sampled_vocab].log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    for one in (plain, model):
        torch.testing.assert_close(one.logprobs(ids), scores, atol=1e-4, rtol=0)
    assert model.logprobs(ids[:1]).shape == (0,)


def test_the_path_says_how_a_prompt_ran(pair):
    plain, model = pair
    params = model.defaults.params
    assert path_of(model.executor, params, CHUNK + 1) == "chunks"
    assert path_of(model.executor, params, CHUNK) == "steps"
    assert path_of(plain.executor, params, 1000) == "reference-fp32"
