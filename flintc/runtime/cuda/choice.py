"""Choosing tokens where the logits are: by the plan's sampler inside the graph, or by torch where it cannot."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from flintc.runtime.cuda.step import DeviceStep
from flintc.runtime.cuda.transfer import Download, Upload
from flintc.runtime.cuda.wide import WideStep
from flintc.runtime.sampling import Sampled, SamplingParams, sample

#: How a row chooses whose token nobody reads.
_UNREAD = SamplingParams(temperature=0.0)


def request_words(params: SamplingParams, vocab: int) -> tuple[int, ...]:
    """How a row chooses, as :mod:`flintc.codegen.sampler` lays it out; ids from ``vocab`` on are padding."""
    packed = struct.pack("<ddQii", params.temperature, params.top_p, params.seed, min(params.top_k, vocab), vocab)
    return struct.unpack("<8i", packed)


class PendingChoice:
    """Tokens that a started step chooses, for ``rows`` rows."""

    def __init__(self, rows: int, download: Download) -> None:
        self.download = download
        self._rows = rows
        self._made: Sampled | None = None

    def wait(self) -> Sampled:
        """The tokens, once they are there; -1 where a row's logits are not finite."""
        if self._made is None:
            tokens, logprobs = (staged[: self._rows].clone() for staged in self.download.wait())
            self._made = Sampled(tokens.long(), logprobs)
        return self._made


class Chooser:
    """Runs steps of ``step`` that end in a choice, and leaves their tokens and positions as the next step's inputs."""

    def __init__(self, step: DeviceStep | WideStep, vocab: int) -> None:
        self._step = step
        self._vocab = vocab
        self._most = step.plan.sampler.most if step.plan.sampler else 0
        rows = step.batches[-1]
        own = {"tokens": torch.zeros(rows, dtype=torch.int32), "logprobs": torch.zeros(rows)}
        memory = step.sampler or {name: tensor.to(step.device) for name, tensor in own.items()}
        self._tokens, self._logprobs = memory["tokens"], memory["logprobs"]
        self._upload = Upload(memory["requests"]) if step.sampler else None
        # Two: the host reads the tokens of one step while the next is making its own.
        self._pending = [PendingChoice(0, Download(self._tokens, self._logprobs)) for _ in range(2)]
        self._by_torch: dict[int, SamplingParams] = {}
        self._limit = vocab

    def serves(self, params: SamplingParams) -> bool:
        """Whether the sampler can choose so."""
        return self._most > 0 and (params.temperature == 0.0 or 1 <= params.top_k <= self._most)

    def ask(self, params: Sequence[SamplingParams | None], vocab: int | None) -> None:
        """Say how each row chooses from now on; None: its token is not read. Ids from ``vocab`` on are padding."""
        self._limit = self._vocab if vocab is None else vocab
        asked = [p or _UNREAD for p in params]
        self._by_torch = {row: p for row, p in enumerate(asked) if not self.serves(p)}
        if self._upload is not None:
            unread = self._step.batches[-1] - len(asked)
            served = [p if self.serves(p) else _UNREAD for p in (*asked, *[_UNREAD] * unread)]
            words = [request_words(p, self._limit) for p in served]
            self._upload(torch.tensor(words, dtype=torch.int32))

    def start(self, batch: int, positions: Sequence[int]) -> PendingChoice:
        """Start a step of ``batch`` rows, the first of them at ``positions``, and the choice of their tokens.

        What a row gets depends on how it chooses itself, never on the other rows.
        """
        self._step.replay(batch, "tokens" if self._upload is not None else "logits")
        if self._by_torch:
            self._choose(batch, positions)
        oldest = self._pending.pop(0)
        oldest.wait()  # its memory on the host is about to be used again
        self._pending.append(PendingChoice(len(positions), oldest.download))
        oldest.download.start()
        return self._pending[-1]

    def _choose(self, batch: int, positions: Sequence[int]) -> None:
        """What the sampler does, in torch, for the rows that it cannot serve."""
        rows = torch.tensor(list(self._by_torch), device=self._step.device)
        next_positions = [positions[row] + 1 for row in self._by_torch]
        logits = self._step.value(self._step.plan.graph.outputs[0], batch)[rows]
        finite = logits.isfinite().all(1)
        chosen = sample(logits.where(finite[:, None], 0.0), [*self._by_torch.values()], next_positions, self._limit)
        tokens = chosen.ids.where(finite, -1).int()
        self._tokens[rows] = tokens
        self._logprobs[rows] = chosen.logprobs
        self._input("ids")[rows] = tokens.clamp(min=0)
        self._input("positions")[rows] = torch.tensor(next_positions, dtype=torch.int32, device=rows.device)

    def _input(self, name: str) -> Tensor:
        tensor = self._step.tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor
