"""Runs requests together: prompts one by one, and one row per request in each step.

Between two pieces of a prompt the requests that are under way get a step, so that it delays them by a piece at most.

A request's tokens are the same whatever runs beside it: its prompt is cut by its own length, its rows do not see
the others', and its random numbers follow from its own seed and positions. (With wide steps, which a model has that is
asked for slots enough, the number of requests chooses the kernels, and so the order of sums.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flintc.errors import VerificationError
from flintc.runtime.executor import (
    Choice,
    ChoosingExecutor,
    Executor,
    PromptExecutor,
    prefill,
    prefill_and_choose,
    turns,
)
from flintc.runtime.generation import FinishReason, Request
from flintc.runtime.sampling import Sampled, sample


@dataclass(frozen=True, slots=True)
class Event:
    """A token that request number ``request`` got; the last one carries the reason for its end."""

    request: int
    token: int
    logprob: float
    finish: FinishReason | None


@dataclass(slots=True)
class Running:
    """A request in its slot: ``token`` is the newest token, not yet processed, ``made`` counts them."""

    number: int
    request: Request
    slot: int
    token: int = -1
    made: int = 0


def run_requests(executor: Executor, requests: Sequence[Request], vocab: int | None) -> Iterator[Event]:
    """Tokens of all requests as they come; slots are given back at the end, or when the iterator is closed.

    vocab: ids from there on are never sampled. Requests wait for a free slot; CapacityError where one cannot fit
    even alone.
    """
    waiting = deque(enumerate(requests))
    running: list[Running] = []
    entering: _Entering | None = None
    decoding = Decoding(executor, vocab)
    try:
        while waiting or running or entering:
            if entering is None and waiting and (executor.kv.fits(waiting[0][1].limit) or not running):
                number, request = waiting.popleft()
                one = Running(number, request, executor.kv.add(request.limit))
                entering = _Entering(one, decoding.begin(one, request.prompt))
            if entering is not None:
                event = next(entering.pieces)
                if event is not None:
                    running.append(entering.one)
                    entering = None
                    yield event
                    _retire(executor, running)
            yield from decoding.advance(running)
            _retire(executor, running)
    finally:
        for one in (*running, *([entering.one] if entering else [])):
            executor.kv.finish(one.slot)


@dataclass(frozen=True, slots=True)
class _Entering:
    """A request whose prompt is being processed, and what remains to be done of it."""

    one: Running
    pieces: Iterator[Event | None]


@dataclass(frozen=True, slots=True)
class _Started:
    """A step under way: the requests of its rows, the positions of the tokens it chooses, and the choice."""

    group: tuple[Running, ...]
    positions: tuple[int, ...]
    choice: Choice


class Decoding:
    """Makes tokens for running requests; where the executor chooses them itself, it is kept a step ahead.

    A step ahead is started before the tokens of the step before are known, so a request that a stop id has ended may
    have had one row too many in it: its token is dropped, and what it wrote lies behind the end of its sequence.
    """

    def __init__(self, executor: Executor, vocab: int | None) -> None:
        self._executor = executor
        self._vocab = vocab
        self._ahead: _Started | None = None

    def begin(self, one: Running, prompt: Sequence[int]) -> Iterator[Event | None]:
        """Process what is left of a request's prompt piece by piece: None after each but the last, then a token."""
        executor, params = self._executor, one.request.params
        sampled: Sampled | None = None
        if isinstance(executor, PromptExecutor) and executor.takes(len(prompt) - 1):
            # Chunks leave the inputs of steps alone. The last token is a step, since steps are what chooses.
            for _ in executor.prompt(one.slot, prompt[:-1]):
                yield None
            prompt = prompt[-1:]
        if isinstance(executor, ChoosingExecutor):
            for sampled in prefill_and_choose(executor, one.slot, prompt, params, self._vocab):
                if sampled is None:
                    yield None
        else:
            length = executor.kv.length(one.slot) + len(prompt)
            for logits in prefill(executor, one.slot, prompt):
                if executor.kv.length(one.slot) < length:
                    yield None
                else:
                    sampled = _sample(logits, [one], [length], self._vocab)
        assert sampled is not None
        (event,) = _events([one], [executor.kv.length(one.slot)], sampled)
        yield event

    def advance(self, running: Sequence[Running]) -> Iterator[Event]:
        """One more token for each running request that has its turn, or for those that the step ahead serves."""
        if not isinstance(self._executor, ChoosingExecutor):
            for group in _groups(self._executor, running):
                yield from self._step(self._executor, group)
        elif self._ahead is not None:
            yield from self._finish(self._executor, self._ahead, running)
        else:
            for group in _groups(self._executor, running):
                yield from self._finish(self._executor, self._start(self._executor, group, False), running)

    def _step(self, executor: Executor, group: tuple[Running, ...]) -> list[Event]:
        positions = [executor.kv.extend(one.slot, 1).start for one in group]
        slots, tokens = [one.slot for one in group], [one.token for one in group]
        logits = executor.step(tokens, positions, slots, logits_rows=range(len(group)))
        chosen = [p + 1 for p in positions]
        return _events(group, chosen, _sample(logits, group, chosen, self._vocab))

    def _start(self, executor: ChoosingExecutor, group: tuple[Running, ...], ahead: bool) -> _Started:
        positions = [executor.kv.extend(one.slot, 1).start for one in group]
        slots, params = [one.slot for one in group], [one.request.params for one in group]
        tokens = None if ahead else [one.token for one in group]
        choice = executor.choose(tokens, positions, slots, params, self._vocab)
        return _Started(group, tuple(p + 1 for p in positions), choice)

    def _finish(self, executor: ChoosingExecutor, started: _Started, running: Sequence[Running]) -> list[Event]:
        """The tokens of a step, and the same rows' next step started if it is sure to be wanted."""
        self._ahead = None
        last = any(one.made + 1 >= one.request.max_tokens for one in started.group)
        # A prompt's step may have come between, or another caller's: whoever takes these tokens may do so at leisure.
        same = executor.goes_on(started.choice) and [started.group] == list(_groups(executor, running))
        if not last and same:
            self._ahead = self._start(executor, started.group, True)
        return _events(started.group, started.positions, started.choice.wait())


def _groups(executor: Executor, running: Sequence[Running]) -> Iterator[tuple[Running, ...]]:
    for rows in turns(executor, len(running)):
        yield tuple(running[rows.start : rows.stop])


def finished(one: Running) -> FinishReason | None:
    """Why a request has ended, if it has."""
    if one.token in one.request.stop_ids:
        return "stop"
    return "length" if one.made >= one.request.max_tokens else None


def _sample(logits: Tensor, group: Sequence[Running], positions: Sequence[int], vocab: int | None) -> Sampled:
    """A token for each row, -1 where its logits are not finite; ``positions`` are those the new tokens take."""
    finite = logits.isfinite().all(1)
    made = sample(logits.where(finite[:, None], 0.0), [one.request.params for one in group], positions, vocab)
    return Sampled(made.ids.where(finite, -1), made.logprobs)


def _events(group: Sequence[Running], positions: Sequence[int], sampled: Sampled) -> list[Event]:
    """Hand the tokens to their requests; those that have ended meanwhile get none."""
    events = []
    rows = zip(group, positions, sampled.ids.tolist(), sampled.logprobs.tolist(), strict=True)
    for one, position, token, logprob in rows:
        if one.made and finished(one):
            continue
        if token < 0:
            raise VerificationError(f"the logits of position {position - 1} are not finite numbers")
        one.token, one.made = token, one.made + 1
        events.append(Event(one.number, token, logprob, finished(one)))
    return events


def _retire(executor: Executor, running: list[Running]) -> None:
    for one in [one for one in running if finished(one)]:
        running.remove(one)
        executor.kv.finish(one.slot)
