"""A loaded model: logits, and text or tokens from prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any, Unpack

import torch
from torch import Tensor

from flintc.checkpoint import LoadReport
from flintc.errors import CapacityError, TokenizerError, UsageError
from flintc.runtime.batch import Event, run_requests
from flintc.runtime.chat import Message
from flintc.runtime.executor import Executor, logits_of, path_of
from flintc.runtime.generation import Generation, GenerationDefaults, Options, Request, Token
from flintc.runtime.session import Session
from flintc.runtime.tokenizer import Tokenizer

#: A text, or token ids.
Prompt = str | Sequence[int]


class Model:
    """Runs a checkpoint on one executor.

    vocab: rows of the output head. tokenizer: or the reason why there is none, raised by calls that need text;
    without one no id is masked and results have no text. notes: what loading did to the weights, one line each.
    loaded: what it took; None where the weights came from elsewhere.
    """

    def __init__(
        self,
        executor: Executor,
        vocab: int,
        tokenizer: Tokenizer | TokenizerError,
        defaults: GenerationDefaults | None = None,
        notes: tuple[str, ...] = (),
        loaded: LoadReport | None = None,
    ) -> None:
        self.executor = executor
        self.vocab = vocab
        self.defaults = defaults or GenerationDefaults()
        self.notes = notes
        self.loaded = loaded
        if isinstance(tokenizer, Tokenizer) and tokenizer.count > vocab:
            tokenizer = TokenizerError(f"the tokenizer has {tokenizer.count} ids, the model {vocab}")
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; TokenizerError says why there is none."""
        if isinstance(self._tokenizer, TokenizerError):
            raise self._tokenizer
        return self._tokenizer

    @property
    def context(self) -> int:
        """Most tokens of one sequence, prompt and output together."""
        return self.executor.kv.context

    @property
    def sampled_vocab(self) -> int | None:
        """Ids from here on are padding and never sampled; None where no tokenizer tells."""
        return self._tokenizer.count if isinstance(self._tokenizer, Tokenizer) else None

    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token of one prompt: f32[T, vocab] on the CPU.

        UsageError: no tokens, or ids outside the vocabulary. CapacityError: more tokens than the context.
        """
        ids = self._ids(token_ids)
        logits = torch.empty((len(ids), self.vocab))
        for first, part in self._logits(ids):
            logits[first : first + len(part)] = part
        return logits

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probability of each token after the first, given those before it: f32[T - 1] on the CPU.

        -inf for ids that are padding, which are never sampled. Needs no memory for the logits of all positions. Errors
        are those of :meth:`forward`.
        """
        ids = self._ids(token_ids)
        found = [torch.empty(0)]
        for first, part in self._logits(ids):
            following = torch.tensor(ids[first + 1 : first + 1 + len(part)], device=part.device)
            given = part[: len(following), : self.sampled_vocab].log_softmax(-1)
            padding = following >= given.shape[1]
            chosen = given.gather(1, following.masked_fill(padding, 0)[:, None])[:, 0]
            found.append(chosen.masked_fill(padding, float("-inf")).cpu())
        return torch.cat(found)

    def _logits(self, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Logits of a prompt, some positions at a time, each with the first of them."""
        slot = self.executor.kv.add(len(ids))
        try:
            first = 0
            for part in logits_of(self.executor, slot, ids):
                yield first, part
                first += len(part)
        finally:
            self.executor.kv.finish(slot)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Continue ``prompt``, a raw text or token ids; see :class:`Options`."""
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], each: Sequence[Options] | None = None, **options: Unpack[Options]
    ) -> list[Generation]:
        """Continue several prompts, decoded together; each gets what it would get alone.

        each: options of the single prompts, in place of ``options`` where they say something.
        """
        if each is not None and len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts but options for {len(each)}")
        own: Sequence[Options] = each or [{}] * len(prompts)
        requests = [self.request(p, {**options, **o}) for p, o in zip(prompts, own, strict=True)]
        events: list[list[Event]] = [[] for _ in requests]
        for event in self.events(requests):
            events[event.request].append(event)
        return [self.result(request, made) for request, made in zip(requests, events, strict=True)]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Token]:
        """Continue ``prompt`` token by token; mistakes in the arguments are raised at once, not at the first token."""
        return self._stream(self.request(prompt, options))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """The answer to a conversation, through the chat template.

        messages: dicts with ``role`` and ``content``. tools: JSON schemas of functions. template: further variables
        of the template, such as ``{"enable_thinking": False}``.
        """
        return self.generate(self.tokenizer.encode_chat(messages, tools, **(template or {})), **options)

    def session(self) -> Session:
        """A sequence that stays cached between calls, so that a longer prompt with the same start is continued."""
        return Session(self)

    def request(self, prompt: Prompt, options: Options) -> Request:
        """A validated request; CapacityError names the context limit where prompt and output exceed it."""
        request = self.defaults.request(self._ids(prompt), options, self.context)
        if request.limit > self.context:
            raise CapacityError(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} to generate exceed the context limit "
                f"of {self.context}",
                remedy="shorten the prompt, lower max_tokens, or load the model with a larger context",
            )
        return request

    def events(self, requests: Sequence[Request]) -> Iterator[Event]:
        """What ``requests``, decoded together, get: an event for each token, as soon as it is there."""
        return run_requests(self.executor, requests, self.sampled_vocab)

    def text(self, request: Request, token_ids: Sequence[int]) -> str | None:
        """Text of what a request got, without the id that stopped it; None without a tokenizer."""
        if isinstance(self._tokenizer, TokenizerError):
            return None
        stopped = bool(token_ids) and token_ids[-1] in request.stop_ids
        return self._tokenizer.decode(token_ids[:-1] if stopped else token_ids)

    def result(self, request: Request, events: Sequence[Event], reused: int = 0) -> Generation:
        """The outcome of a request that got ``events``; the last of them says why it ended."""
        finish = events[-1].finish
        assert finish is not None
        ids = tuple(event.token for event in events)
        logprobs = tuple(event.logprob for event in events)
        return Generation(
            ids, self.text(request, ids), len(request.prompt), finish,
            path_of(self.executor, request.params, len(request.prompt) - reused), request.params.seed, logprobs, reused,
        )  # fmt: skip

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        given = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        try:
            ids = tuple(index(i) for i in given)
        except TypeError as error:
            raise UsageError(f"token ids must be a sequence of whole numbers: {error}") from error
        if not ids:
            raise UsageError("the prompt is empty")
        wrong = next((i for i in ids if not 0 <= i < self.vocab), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} is outside the vocabulary of {self.vocab}")
        return ids

    def _stream(self, request: Request) -> Iterator[Token]:
        text = self._tokenizer.stream() if isinstance(self._tokenizer, Tokenizer) else None
        for event in self.events([request]):
            piece = None
            if text is not None:
                piece = "" if event.finish == "stop" else text.push(event.token)
                piece += text.finish() if event.finish else ""
            yield Token(event.token, piece, event.logprob, event.finish)
