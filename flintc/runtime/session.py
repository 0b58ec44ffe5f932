"""A conversation whose start stays in the KV cache between calls."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Unpack

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
        self._slot = self._kv.add(model.context)
        self._cached: tuple[int, ...] = ()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the slot back; the session cannot be used afterwards."""
        self._kv.finish(self._slot)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Continue ``prompt`` as :meth:`Model.generate` does; ``reused`` says how much of it was cached."""
        model = self._model
        request = model.request(prompt, options)
        kept = self._reusable(request.prompt)
        self._kv.cut(self._slot, kept)
        one, decoding = Running(0, request, self._slot), Decoding(model.executor, model.sampled_vocab)
        # Until all is done: after a step that failed, positions count as held whose keys were never written.
        self._cached = ()
        events: list[Event] = [e for e in decoding.begin(one, request.prompt[kept:]) if e is not None]
        while not finished(one):
            events += decoding.advance([one])
        tokens = (*request.prompt, *(event.token for event in events))
        self._cached = tokens[: self._kv.length(self._slot)]
        return model.result(request, events, kept)

    def _reusable(self, prompt: tuple[int, ...]) -> int:
        """Tokens of ``prompt`` that need not be computed again; its last one always is, for its logits."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._cached, prompt, strict=False)))
        kept = min(same, len(prompt) - 1)
        return kept if self._kv.holds(self._slot, kept) else 0
