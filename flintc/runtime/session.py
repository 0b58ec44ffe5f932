"""A conversation whose start stays in the KV cache between calls."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Unpack

from flintc.errors import UsageError
from flintc.runtime.batch import Decoding, Event, Running, finished
from flintc.runtime.generation import Generation, Options

if TYPE_CHECKING:
    from flintc.runtime.model import Model, Prompt


class Session:
    """Holds one sequence slot of ``model`` until closed; use it in a ``with`` statement.

    A call computes only what its prompt adds to the tokens already cached. Where the prompt departs from them too
    far back for a sliding window, all of it is computed again.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kv = model.executor.kv
        self._slot: int | None = self._kv.add(model.context)
        self._cached: tuple[int, ...] = ()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the slot back, if that has not been done; the session cannot be used afterwards."""
        if self._slot is not None:
            self._kv.finish(self._slot)
        self._slot = None

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Continue ``prompt`` as :meth:`Model.generate` does; ``reused`` says how much of it was cached.

        UsageError where the session is closed.
        """
        model, slot = self._model, self._slot
        if slot is None:
            raise UsageError("this session is closed", remedy="open another with Model.session()")
        request = model.request(prompt, options)
        kept = self._reusable(request.prompt, slot)
        self._kv.cut(slot, kept)
        one, decoding = Running(0, request, slot), Decoding(model.executor, model.sampled_vocab)
        # Until all is done: after a step that failed, positions count as held whose keys were never written.
        self._cached = ()
        events: list[Event] = [e for e in decoding.begin(one, request.prompt[kept:]) if e is not None]
        while not finished(one):
            events += decoding.advance([one])
        tokens = (*request.prompt, *(event.token for event in events))
        self._cached = tokens[: self._kv.length(slot)]
        return model.result(request, events, kept)

    def _reusable(self, prompt: tuple[int, ...], slot: int) -> int:
        """Tokens of ``prompt`` that need not be computed again; its last one always is, for its logits."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._cached, prompt, strict=False)))
        kept = min(same, len(prompt) - 1)
        return kept if self._kv.holds(slot, kept) else 0
