"""One step of real rows: caches filled by the model itself, every value the reference makes, launches run on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flintc.bench.runners import ReferenceRunner, Runner, Values
from flintc.bench.subject import Subject, on_device
from flintc.ir.graph import Graph, Launch
from flintc.reference import Nvfp4
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.storage import KvStorage, rows_of_tables

#: Rows of a step.
ROWS = 8
_ROW_INPUTS = ("ids", "positions", "seqs")


@dataclass
class StepInputs:
    """What a step is given, by value name, caches as they are before it; ``env`` holds its run-time symbols."""

    values: dict[str, Tensor | Nvfp4]
    env: dict[str, int]

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.env["B"]

    def caches(self, graph: Graph) -> dict[str, Tensor]:
        """A fresh copy of every cache."""
        found = {name: self.values[name] for name in set(graph.first_versions.values())}
        return {name: t.clone() for name, t in found.items() if isinstance(t, Tensor)}

    def to(self, device: str) -> StepInputs:
        """The same on ``device``."""
        return StepInputs(on_device(self.values, device), self.env)

    def group(self, rows: slice) -> StepInputs:
        """The same step with some of its rows alone."""
        part = dict(self.values)
        for name in _ROW_INPUTS:
            tensor = part[name]
            assert isinstance(tensor, Tensor)
            part[name] = tensor[rows]
        return StepInputs(part, {**self.env, "B": len(range(*rows.indices(self.rows)))})


def filler(runner: Runner) -> Runner | None:
    """``runner`` where it can fill caches in reasonable time: compiled kernels can."""
    return runner if runner.name == "cuda" else None


def prepare_step(
    subject: Subject, prompts: Sequence[Sequence[int]], runner: Runner | None = None, device: str = "cpu"
) -> StepInputs:
    """A step of one row per prompt (at most ROWS) on ``device``: its last token, after all the others have been cached.

    runner: fills the caches, on its device (default: the reference).
    """
    fill = runner or ReferenceRunner(subject.graph("baseline"), device)
    graph, device = fill.graph, fill.device
    context = max(map(len, prompts))
    kv = KvCache(KvLayout.from_graph(graph), context, len(prompts))
    storage = KvStorage(kv, torch.bfloat16, device, whole=True)
    tables = subject.tables(graph, context, device)
    given = {**subject.weights_on(device), **tables, **storage.tensors}
    env = {
        "Q": kv.slots, "T": -(-context // kv.layout.page), "P": kv.pages, "C": rows_of_tables(tables),
    }  # fmt: skip
    slots = [kv.add(len(ids)) for ids in prompts]
    for slot, ids in zip(slots, prompts, strict=True):
        for start in range(0, len(ids) - 1, ROWS):
            part = ids[start : min(start + ROWS, len(ids) - 1)]
            at = kv.extend(slot, len(part))
            rows = _rows(part, at, [slot] * len(part), device)
            body = [launch for launch in graph.launches if launch in graph.body]
            run_step(fill, StepInputs({**given, **rows, **_moved(kv, device)}, {**env, "B": len(part)}), body)
    last = [kv.extend(slot, 1)[0] for slot in slots]
    rows = _rows([ids[-1] for ids in prompts], last, slots, device)
    return StepInputs({**given, **rows, **_moved(kv, device)}, {**env, "B": len(prompts)})


def _rows(ids: Sequence[int], positions: Sequence[int], seqs: Sequence[int], device: str) -> dict[str, Tensor]:
    columns = zip(_ROW_INPUTS, (ids, positions, seqs), strict=True)
    return {name: torch.tensor(list(column), dtype=torch.int32, device=device) for name, column in columns}


def _moved(kv: KvCache, device: str) -> dict[str, Tensor]:
    return {name: table.to(device) for name, table in kv.tables.items()}


def run_step(runner: Runner, inputs: StepInputs, launches: Sequence[Launch] | None = None) -> dict[str, Tensor]:
    """Every launch in order, each on what those before it made; caches are written in place.

    Returns the activations made, and each cache version that a launch made, as it is at the end.
    """
    values: dict[str, Tensor | Nvfp4] = dict(inputs.values)
    made: dict[str, Tensor] = {}
    for launch in launches or runner.graph.launches:
        new = runner.run(launch, values, inputs.env) | new_caches(runner.graph, launch, values)
        values.update(new)
        made.update(new)
    return made


def new_caches(graph: Graph, launch: Launch, values: Values) -> dict[str, Tensor]:
    """The cache versions that ``launch`` has made, in the memory of those it read."""
    found: dict[str, Tensor] = {}
    for op in (graph.ops[o] for o in launch.ops):
        if op.kind == "kv_write":
            cache = values[op.inputs[2]]
            assert isinstance(cache, Tensor)
            found[op.outputs[0]] = cache
    return found


def run_in_groups(runner: Runner, inputs: StepInputs, batch: int) -> dict[str, Tensor]:
    """A whole step in steps of ``batch`` rows: activations with their rows put together again, caches at the end.

    Rows must belong to different sequences. Starts from copies of the caches.
    """
    caches = inputs.caches(runner.graph)
    parts = [run_step(runner, StepInputs({**part.values, **caches}, part.env)) for part in groups(inputs, batch)]
    return join(runner.graph, parts)


def groups(inputs: StepInputs, batch: int) -> Iterator[StepInputs]:
    """Steps of up to ``batch`` rows that make up ``inputs``."""
    for start in range(0, inputs.rows, batch):
        yield inputs.group(slice(start, start + batch))


def join(graph: Graph, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Activations of several groups of rows as one; caches, which they share, once."""
    whole: dict[str, Tensor] = {}
    for name in parts[0]:
        if graph.values[name].kind == "cache":
            whole[name] = parts[-1][name]
        else:
            whole[name] = torch.cat([part[name] for part in parts])
    return whole
