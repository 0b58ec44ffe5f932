"""Runs requests together: prompts one by one, then one row per request in each step.

A request's tokens are the same whatever runs beside it: its prompt is cut by its own length, its rows do not see
the others', and its random numbers follow from its own seed and positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flintc.errors import VerificationError
from flintc.runtime.executor import Executor, prefill
from flintc.runtime.generation import FinishReason, Request
from flintc.runtime.sampling import sample


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
    try:
        while waiting or running:
            while waiting and (executor.kv.fits(waiting[0][1].limit) or not running):
                number, request = waiting.popleft()
                one = Running(number, request, executor.kv.add(request.limit))
                running.append(one)
                yield begin(executor, one, request.prompt, vocab)
                _retire(executor, running)
            yield from advance(executor, running, vocab)
            _retire(executor, running)
    finally:
        for one in running:
            executor.kv.finish(one.slot)


def begin(executor: Executor, one: Running, prompt: Sequence[int], vocab: int | None) -> Event:
    """Process what is left of a request's prompt and choose its first token."""
    (event,) = _choose([one], prefill(executor, one.slot, prompt), [executor.kv.length(one.slot)], vocab)
    return event


def advance(executor: Executor, running: Sequence[Running], vocab: int | None) -> Iterator[Event]:
    """One more token for each running request."""
    for start in range(0, len(running), executor.rows):
        group = running[start : start + executor.rows]
        positions = [executor.kv.extend(one.slot, 1).start for one in group]
        slots = [one.slot for one in group]
        tokens = [one.token for one in group]
        logits = executor.step(tokens, positions, slots, logits_rows=range(len(group)))
        yield from _choose(group, logits, [p + 1 for p in positions], vocab)


def finished(one: Running) -> FinishReason | None:
    """Why a request has ended, if it has."""
    if one.token in one.request.stop_ids:
        return "stop"
    return "length" if one.made >= one.request.max_tokens else None


def _choose(group: Sequence[Running], logits: Tensor, positions: Sequence[int], vocab: int | None) -> list[Event]:
    """Sample a token for each row; ``positions`` are those the new tokens take."""
    broken = (~logits.isfinite()).any(1).nonzero()
    if len(broken):
        raise VerificationError(f"the logits of position {positions[int(broken[0])] - 1} are not finite numbers")
    sampled = sample(logits, [one.request.params for one in group], positions, vocab)
    events = []
    for one, token, logprob in zip(group, sampled.ids.tolist(), sampled.logprobs.tolist(), strict=True):
        one.token, one.made = token, one.made + 1
        events.append(Event(one.number, token, logprob, finished(one)))
    return events


def _retire(executor: Executor, running: list[Running]) -> None:
    for one in [one for one in running if finished(one)]:
        running.remove(one)
        executor.kv.finish(one.slot)
