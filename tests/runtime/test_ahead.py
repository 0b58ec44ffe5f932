"""Executors that choose tokens themselves and are kept a step ahead: requests get what they get without."""

import pytest
import torch

from flintc.errors import VerificationError
from flintc.runtime.executor import ChoosingExecutor
from flintc.runtime.model import Model
from flintc.runtime.sampling import Sampled, SamplingParams, sample

GENERATOR = torch.Generator().manual_seed(4)


class Choice:
    def __init__(self, executor, made):
        self.executor, self.made = executor, made

    def wait(self):
        self.executor.waited += 1
        return self.made


class Ahead:
    """A reference executor in the clothes of a GPU: tokens are known to it before anyone waits for them."""

    path = "ahead"

    def __init__(self, inner):
        self.inner, self.kv, self.rows = inner, inner.kv, inner.rows
        self.started = self.waited = self.most_ahead = self.chained = 0
        self.last = None
        self.broken_at = None

    def step(self, ids, positions, seqs, *, logits_rows):
        self.last = None
        return self.inner.step(ids, positions, seqs, logits_rows=logits_rows)

    def serves(self, params):
        return params.top_k == 20

    def choose(self, ids, positions, seqs, params, vocab):
        if ids is None:
            ids, before, slots, asked = self.last
            assert (list(seqs), list(params)) == (slots, asked), "a step went on from other rows"
            assert list(positions) == [p + 1 for p in before]
            self.chained += 1
        logits = self.inner.step(ids, positions, seqs, logits_rows=range(len(ids)))
        made = sample(logits, [p or SamplingParams(temperature=0.0) for p in params], [p + 1 for p in positions], vocab)
        if self.broken_at in positions:
            made = Sampled(made.ids.masked_fill(torch.tensor(positions) == self.broken_at, -1), made.logprobs)
        self.last = made.ids.clamp(min=0).tolist(), list(positions), list(seqs), list(params)
        self.started += 1
        self.most_ahead = max(self.most_ahead, self.started - self.waited)
        self.newest = Choice(self, made)
        return self.newest

    def goes_on(self, choice):
        return self.last is not None and choice is self.newest


def test_groups_of_fewer_rows_than_requests(pair):
    """Then no step goes on from another."""
    plain, ahead = pair
    plain.executor.rows = ahead.executor.rows = 3
    batch = prompts(3, 9, 5, 12, 2)
    options = [{"seed": i, "max_tokens": 4 + i} for i in range(5)]
    for ours, theirs in zip(ahead.generate_batch(batch, options), plain.generate_batch(batch, options), strict=True):
        assert same(ours, theirs)


@pytest.fixture
def pair(make_model):
    """(a model that waits for each step, the same a step ahead)"""
    plain, inner = make_model("rounded"), make_model("rounded")
    return plain, Model(Ahead(inner.executor), inner.vocab, inner._tokenizer)


def prompts(*lengths):
    return [torch.randint(0, 256, (n,), generator=GENERATOR).tolist() for n in lengths]


def same(ours, theirs):
    return (ours.token_ids, ours.finish_reason, ours.logprobs) == (
        theirs.token_ids,
        theirs.finish_reason,
        theirs.logprobs,
    )


def test_one_request(pair):
    plain, ahead = pair
    assert isinstance(ahead.executor, ChoosingExecutor)
    assert not isinstance(plain.executor, ChoosingExecutor)
    (prompt,) = prompts(21)
    assert same(ahead.generate(prompt, max_tokens=12, seed=3), plain.generate(prompt, max_tokens=12, seed=3))
    assert ahead.executor.most_ahead == 2
    # Twelve tokens take twelve steps, the last of the prompt's slices among them, and none is run for nothing.
    assert (ahead.executor.started, ahead.executor.chained) == (12, 10)


def test_requests_of_many_lengths_with_stops(pair):
    plain, ahead = pair
    batch = prompts(3, 40, 13, 1, 30, 12, 17, 14, 5, 60)  # more requests than slots
    free = plain.generate_batch(batch, [{"seed": i, "max_tokens": 20} for i in range(10)])
    # Every other request ends at a token that it would have made anyway.
    stops = [made.token_ids[4 + i] if i % 2 else -5 for i, made in enumerate(free)]
    options = [{"seed": i, "max_tokens": 6 + i % 7, "stop_ids": (stops[i],)} for i in range(10)]
    for ours, theirs in zip(ahead.generate_batch(batch, options), plain.generate_batch(batch, options), strict=True):
        assert same(ours, theirs)
    assert ahead.executor.chained > 0
    assert ahead.executor.kv.fits(512)


def test_a_session_goes_on_after_a_stop(make_model):
    plain, inner = make_model(), make_model()
    ahead = Model(Ahead(inner.executor), inner.vocab, inner._tokenizer)
    (prompt,) = prompts(25)
    greedy = {"max_tokens": 9, "temperature": 0.0}
    made = plain.generate(prompt, **greedy, stop_ids=()).token_ids
    stop = next(token for i, token in enumerate(made) if i > 2 and token not in made[:i])
    with ahead.session() as session:
        first = session.generate(prompt, **greedy, stop_ids=(stop,))
        longer = [*prompt, *first.token_ids, 7, 8, 9]
        second = session.generate(longer, **greedy, stop_ids=())
    assert first.finish_reason == "stop"
    # The step ahead has already processed the token that ended the first text.
    assert second.reused == len(prompt) + len(first.token_ids)
    assert second.token_ids == plain.generate(longer, **greedy, stop_ids=()).token_ids


def test_a_stream_may_be_left(pair):
    plain, ahead = pair
    first, second = prompts(18, 11)
    stream = ahead.stream(first, max_tokens=50, seed=1)
    for _ in range(3):
        next(stream)
    stream.close()
    assert ahead.executor.kv.fits(512)
    assert same(ahead.generate(second, max_tokens=9, seed=2), plain.generate(second, max_tokens=9, seed=2))


def test_streams_side_by_side(pair):
    """Each rewrites the inputs that the other would go on from."""
    plain, ahead = pair
    first, second = prompts(18, 11)
    streams = [ahead.stream(first, max_tokens=12, seed=1), ahead.stream(second, max_tokens=12, seed=2)]
    made = list(zip(*streams, strict=True))
    for got, prompt, seed in zip(zip(*made, strict=True), (first, second), (1, 2), strict=True):
        assert tuple(token.id for token in got) == plain.generate(prompt, max_tokens=12, seed=seed).token_ids


@pytest.mark.parametrize("between", ["generate", "forward", "session"])
def test_another_call_while_a_stream_waits(pair, between):
    plain, ahead = pair
    first, second = prompts(18, 11)
    stream = ahead.stream(first, max_tokens=12, seed=1)
    made = [next(stream).id for _ in range(4)]
    if between == "generate":
        assert same(ahead.generate(second, max_tokens=9, seed=2), plain.generate(second, max_tokens=9, seed=2))
    elif between == "forward":
        assert torch.equal(ahead.forward(second), plain.forward(second))
    else:
        with ahead.session() as session:
            session.generate(second, max_tokens=3)
    made += [token.id for token in stream]
    assert tuple(made) == plain.generate(first, max_tokens=12, seed=1).token_ids


def test_broken_logits_are_told_with_their_position(pair):
    _, ahead = pair
    ahead.executor.broken_at = 30
    (prompt,) = prompts(25)
    with pytest.raises(VerificationError, match="logits of position 30 are not finite"):
        ahead.generate(prompt, max_tokens=20, seed=1)
    assert len(ahead.generate(prompt, max_tokens=6, seed=1).token_ids) == 6


def test_path_says_who_chose(pair):
    _, ahead = pair
    (prompt,) = prompts(5)
    assert ahead.generate(prompt, max_tokens=2).path == "ahead"
    assert ahead.generate(prompt, max_tokens=2, top_k=0).path == "ahead, tokens chosen by torch"
