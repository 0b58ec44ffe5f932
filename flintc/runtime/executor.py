"""What runs a forward step, and how prompts are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flintc.runtime.kv import KvCache
from flintc.runtime.sampling import Sampled, SamplingParams


class Executor(Protocol):
    """Runs steps of rows; owns the weights and the cached keys and values that ``kv`` keeps the books of.

    kv: positions must be made room for there (``extend``) before the step that writes them.
    rows: most rows of one step. path: what a report calls this way of running.
    """

    kv: KvCache
    rows: int
    path: str

    def step(
        self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, logits_rows: Sequence[int]
    ) -> Tensor:
        """Run one step and return the logits of the rows ``logits_rows``: f32[len(logits_rows), vocab] on the CPU.

        ids, positions, seqs: token, position and sequence slot of each row. A row's logits do not depend on the rows
        of other sequences, not even in their last bit.
        """
        ...


class Choice(Protocol):
    """Tokens that a started step chooses."""

    def wait(self) -> Sampled:
        """The tokens of the step's rows once they are there; -1 where a row's logits are not finite numbers."""
        ...


@runtime_checkable
class ChoosingExecutor(Executor, Protocol):
    """An executor whose steps choose the next tokens, and can go on from them before the caller has seen them."""

    def serves(self, params: SamplingParams) -> bool:
        """Whether the step itself chooses so; else it is done after the step, which takes longer."""
        ...

    def choose(
        self,
        ids: Sequence[int] | None,
        positions: Sequence[int],
        seqs: Sequence[int],
        params: Sequence[SamplingParams | None],
        vocab: int | None,
    ) -> Choice:
        """Start a step and the choice of each row's next token, and return without waiting for them.

        ids: None for the tokens that the step before chose, with the same ``seqs`` and ``params`` and the next
        positions: see :meth:`goes_on`. params: None for a row whose token is not read. vocab: ids from there on are
        never chosen.
        """
        ...

    def goes_on(self, choice: Choice) -> bool:
        """Whether the next step can go on from the tokens of ``choice``: no other step has had inputs since."""
        ...


@runtime_checkable
class PromptExecutor(Executor, Protocol):
    """An executor with a path of its own for prompts: chunks of many rows, which may go on between other steps."""

    prompt_path: str

    def takes(self, tokens: int) -> bool:
        """Whether that many next tokens of a sequence are worth that path."""
        ...

    def prompt(self, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """Process the next tokens of ``slot``, a chunk each time: yields what the output head reads of its rows."""
        ...

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """Logits of the rows of ``hidden``, some at a time: f32[rows, vocab] where the executor computes."""
        ...


@runtime_checkable
class WideExecutor(Executor, Protocol):
    """An executor that may also run steps of more than ``rows`` rows, each the newest token of another sequence.

    wide: most rows of such a step; 0: there are none after all. wide_from: sequences under way from which on they
    make more tokens a second than steps of ``rows``, which then serve but some of them. The bits of a row's logits
    depend on the kind of step, and the width of a wide one; not on the other rows.
    """

    wide: int
    wide_from: int


def turns(executor: Executor, waiting: int) -> Iterator[range]:
    """Steps that give a token each to sequences that wait for one: which of them, the longest under way first.

    Where steps may be wide it is one step, since a second, smaller one would make fewer tokens a second: it serves all
    where they are enough for a wide step, else as many as the fast path takes, and the rest wait.
    """
    rows = executor.rows
    if isinstance(executor, WideExecutor) and executor.wide:
        waiting = min(waiting, executor.wide if waiting >= executor.wide_from else rows)
        rows = max(rows, waiting)
    for start in range(0, waiting, rows):
        yield range(start, min(start + rows, waiting))


def path_of(executor: Executor, params: SamplingParams, prompt: int) -> str:
    """How ``executor`` runs a request that chooses so, after ``prompt`` tokens."""
    path = executor.path
    if isinstance(executor, PromptExecutor) and executor.takes(prompt - 1):
        path = executor.prompt_path
    if isinstance(executor, ChoosingExecutor) and not executor.serves(params):
        return f"{path}, tokens chosen by torch"
    return path


def slices(executor: Executor, slot: int, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], range]]:
    """Cut the next tokens of ``slot`` into steps the backend and the rings allow; yields (ids, positions).

    Room for a slice is made when it is yielded. The cuts depend on the number of tokens alone.
    """
    size = min(executor.rows, executor.kv.layout.rows or executor.rows)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        yield part, executor.kv.extend(slot, len(part))


def prefill(executor: Executor, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
    """Process the next tokens of ``slot``, a slice each time; last come the logits of the last token: f32[1, vocab]."""
    last = executor.kv.length(slot) + len(ids) - 1
    for part, positions in slices(executor, slot, ids):
        rows = [len(part) - 1] if positions[-1] == last else []
        yield executor.step(part, positions, [slot] * len(part), logits_rows=rows)


def prefill_and_choose(
    executor: ChoosingExecutor, slot: int, ids: Sequence[int], params: SamplingParams, vocab: int | None
) -> Iterator[Sampled | None]:
    """Process the next tokens of ``slot``, a slice each time: None but for the last, which chooses what follows."""
    last = executor.kv.length(slot) + len(ids) - 1
    for part, positions in slices(executor, slot, ids):
        seqs = [slot] * len(part)
        if positions[-1] != last:
            executor.step(part, positions, seqs, logits_rows=[])
            yield None
        else:
            made = executor.choose(part, positions, seqs, [*[None] * (len(part) - 1), params], vocab).wait()
            yield Sampled(made.ids[-1:], made.logprobs[-1:])


def logits_of(executor: Executor, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
    """Process the next tokens of ``slot``; yields the logits of each, some tokens at a time: f32[tokens, vocab]."""
    if isinstance(executor, PromptExecutor) and executor.takes(len(ids)):
        for hidden in executor.prompt(slot, ids):
            yield from executor.logits(hidden)
        return
    for part, positions in slices(executor, slot, ids):
        yield executor.step(part, positions, [slot] * len(part), logits_rows=range(len(part)))


def forward(executor: Executor, slot: int, ids: Sequence[int]) -> Tensor:
    """Process the next tokens of ``slot`` and return the logits of each: f32[len(ids), vocab] on the CPU."""
    return torch.cat([part.cpu() for part in logits_of(executor, slot, ids)])
