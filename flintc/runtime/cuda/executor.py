"""The backend ``cuda``: a bundle's kernels on one GPU, one CUDA graph per batch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flintc.errors import BackendError
from flintc.ir.plan import CompiledKernel, Plan
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.cuda.capacity import free_bytes, pool_pages, symbols_of, workspace_bytes
from flintc.runtime.cuda.choice import Chooser, PendingChoice
from flintc.runtime.cuda.step import DeviceStep
from flintc.runtime.cuda.transfer import Upload
from flintc.runtime.cuda.wide import WIDTHS, WideStep, default_wide_from, serves_wide, wide_bytes
from flintc.runtime.executor import Choice
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.prefill.launch import CudaLaunch
from flintc.runtime.prefill.memory import chunk_bytes, router_bytes
from flintc.runtime.prefill.path import CHUNK, GeneralPath
from flintc.runtime.sampling import SamplingParams
from flintc.runtime.storage import KvStorage, rows_of_tables

#: Tokens from which on a prompt takes the general path: a chunk costs some 25 ms however short, a step of 8 rows 2.
SHORTEST_PROMPT = 96

_ROW_INPUTS = ("ids", "positions", "seqs")


@dataclass(slots=True)
class _Lane:
    """Steps of one kind, and how their rows are told to them; ``batch``: rows of the last one, padded."""

    step: DeviceStep | WideStep
    chooser: Chooser
    upload: Upload
    batch: int = 0

    def write(self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int]) -> None:
        """Enqueue a step's inputs; rows past the live ones belong to no sequence."""
        self.batch = next(b for b in self.step.batches if b >= len(ids))
        values = torch.zeros((len(_ROW_INPUTS), self.step.batches[-1]), dtype=torch.int32)
        values[2] = -1
        values[:, : len(ids)] = torch.tensor([list(ids), list(positions), list(seqs)], dtype=torch.int32)
        self.upload(values)


class CudaExecutor:
    """Runs ``plan`` from its compiled kernels, with ``weights`` and ``tables`` on the GPU by value name.

    batches: row counts that get a CUDA graph, captured on first use; other counts are padded up with rows that have
    no sequence. context, slots, pages: see :class:`KvCache`; the whole cache is allocated here, since a captured
    graph holds its address. pages default to what the GPU's free memory allows; CapacityError where that is too few.
    chunk: most tokens of a prompt in one chunk of the general path. dependent: see :class:`DeviceStep`.
    With ``wide_from`` slots or more (default: as measured, by the weights), and a plan that has what it takes, there
    are wide steps too: see :class:`~flintc.runtime.executor.WideExecutor`.
    """

    def __init__(
        self,
        plan: Plan,
        compiled: Mapping[str, CompiledKernel],
        weights: Mapping[str, Tensor | Nvfp4],
        tables: Mapping[str, Tensor],
        context: int,
        slots: int,
        batches: Sequence[int] = (1, 2, 4, 8),
        pages: int | None = None,
        chunk: int = CHUNK,
        *,
        dependent: bool = True,
        wide_from: int | None = None,
    ) -> None:
        layout = KvLayout.from_graph(plan.graph)
        self.rows = max(batches)
        self.path = f"cuda, prompt in slices of {self.rows} rows"
        device = next(iter(weights.values())).device
        symbols = symbols_of(layout, context, slots, rows_of_tables(tables))
        #: Requests under way from which on wide steps are worth it; and rows of the widest, 0 without such steps.
        self.wide_from = max(wide_from or default_wide_from(plan.graph), self.rows + 1)
        self.wide = min(slots, WIDTHS[-1]) if slots >= self.wide_from and serves_wide(plan) else 0
        self._wide_bytes = wide_bytes(plan) if self.wide else 0
        if pages is None:
            workspace = workspace_bytes(plan, {**symbols, "B": self.rows}) + _chunk_bytes(plan, chunk, context)
            pages = pool_pages(layout, context, slots, free_bytes(device) - workspace - self._wide_bytes)
        self.kv = KvCache(layout, context, slots, pages)
        self._storage = KvStorage(self.kv, torch.bfloat16, device, whole=True)
        block_tables = {name: table.to(device) for name, table in self.kv.tables.items()}
        rows = torch.zeros((len(_ROW_INPUTS), self.rows), dtype=torch.int32, device=device)
        inputs = dict(zip(_ROW_INPUTS, rows, strict=True))
        given = {**weights, **tables, **self._storage.tensors, **block_tables, **inputs}
        self._step = DeviceStep(plan, compiled, given, {**symbols, "P": pages}, batches, dependent=dependent)
        #: Tokens from which on a prompt takes the general path.
        self.shortest_prompt = SHORTEST_PROMPT
        self.general: GeneralPath | None = None
        if plan.general is not None:
            launch = CudaLaunch(plan.general.kernels, compiled)
            self.general = GeneralPath(plan, launch, self._step.tensors, self.kv, chunk)
            self.prompt_path = f"cuda, prompt in chunks of {chunk} rows"
        self._chunk_bytes = _chunk_bytes(plan, chunk, context)
        self._logits = plan.graph.outputs[0]
        #: Columns of the logits.
        self.vocab = self._step.value(self._logits, 1).shape[1]
        self._fast = _Lane(self._step, Chooser(self._step, self.vocab), Upload(rows))
        self._wide: _Lane | None = None
        if self.wide:
            assert self.general is not None and plan.sampler is not None
            sampling = {launch.kernel: plan.kernels[launch.kernel] for launch in plan.sampler.launches}
            step = WideStep(plan, self.general, CudaLaunch(sampling, compiled), block_tables)
            self._wide = _Lane(step, Chooser(step, self.vocab), Upload(step.inputs))
        self._write_tables = {name: Upload(table) for name, table in block_tables.items()}
        self._tables_written = self.kv.changes
        # The choice whose tokens are the inputs of the next step.
        self._newest: PendingChoice | None = None

    @property
    def caches(self) -> Mapping[str, Tensor]:
        """Keys and values in GPU memory, by the caches' names."""
        return self._storage.tensors

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of GPU memory besides the weights: KV pool, rings, block tables, workspace, the most of a chunk, and
        the most of wide steps where there are any."""
        sizes = {**self.kv.nbytes(), "workspace": self._step.workspace_bytes, "prompt chunk": self._chunk_bytes}
        return sizes | ({"wide steps": self._wide_bytes} if self.wide else {})

    @property
    def note(self) -> str:
        """:attr:`memory` in words."""
        sizes = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in self.memory.items())
        return f"GPU memory beside the weights: {sizes}; the pool holds {self.kv.pages * self.kv.layout.page} tokens"

    def step(
        self, ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, logits_rows: Sequence[int]
    ) -> Tensor:
        """See :class:`~flintc.runtime.executor.Executor`; at most ``rows`` rows, or ``wide``."""
        lane = self._lane(len(seqs))
        lane.write(ids, positions, seqs)
        self._newest = None
        self._write_changed_tables()
        lane.step.replay(lane.batch, "logits" if logits_rows else "body")
        if not logits_rows:
            return torch.empty(0)
        return lane.step.value(self._logits, lane.batch)[list(logits_rows)].cpu()

    def takes(self, tokens: int) -> bool:
        """See :class:`~flintc.runtime.executor.PromptExecutor`."""
        return self.general is not None and tokens >= self.shortest_prompt

    def prompt(self, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """See :class:`~flintc.runtime.executor.PromptExecutor`."""
        assert self.general is not None
        self._check_device()
        return self.general.chunks(slot, ids)

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """See :class:`~flintc.runtime.executor.PromptExecutor`."""
        assert self.general is not None
        return self.general.logits(hidden)

    def serves(self, params: SamplingParams) -> bool:
        """See :class:`~flintc.runtime.executor.ChoosingExecutor`."""
        return self._fast.chooser.serves(params)

    def choose(
        self,
        ids: Sequence[int] | None,
        positions: Sequence[int],
        seqs: Sequence[int],
        params: Sequence[SamplingParams | None],
        vocab: int | None,
    ) -> PendingChoice:
        """See :class:`~flintc.runtime.executor.ChoosingExecutor`; at most ``rows`` rows, or ``wide``."""
        lane = self._lane(len(seqs))
        if ids is not None:
            lane.write(ids, positions, seqs)
            lane.chooser.ask(params, vocab)
        self._write_changed_tables()
        self._newest = lane.chooser.start(lane.batch, positions)
        return self._newest

    def goes_on(self, choice: Choice) -> bool:
        """See :class:`~flintc.runtime.executor.ChoosingExecutor`."""
        return choice is self._newest

    def _lane(self, rows: int) -> _Lane:
        """What runs a step of so many rows."""
        self._check_device()
        if rows <= self.rows:
            return self._fast
        if self._wide is None or rows > self.wide:
            raise BackendError(f"a step of {rows} rows; the most are {self.wide or self.rows}")
        return self._wide

    def _check_device(self) -> None:
        """BackendError in a thread whose current device is another: its stream knows nothing of this model's work."""
        own = self._step.device
        if own.type == "cuda" and own.index != torch.cuda.current_device():
            raise BackendError(
                f"the model is on {own}, and this thread's current device is cuda:{torch.cuda.current_device()}",
                remedy=f"call it in a block `with torch.cuda.device({own.index}):`",
            )

    def _write_changed_tables(self) -> None:
        if self._tables_written != self.kv.changes:
            self._tables_written = self.kv.changes
            for name, write in self._write_tables.items():
                write(self.kv.tables[name])


def _chunk_bytes(plan: Plan, rows: int, context: int) -> int:
    if plan.general is None:
        return 0
    most = chunk_bytes(plan.graph, plan.general, min(rows, context), context)
    return most + router_bytes(plan.graph, plan.general)
