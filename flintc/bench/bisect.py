"""Finds the first value in which two runs of one step differ by more than its bound.

The first run goes through the step by itself. Each launch of the second gets the first one's values, so a difference
is of that launch alone and nothing that came before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flintc.bench.runners import Runner, Values
from flintc.bench.step import StepInputs, groups, join, new_caches, run_in_groups
from flintc.bench.subject import BACKENDS, Subject
from flintc.bench.tolerance import Difference, compare_value, difference, roundings
from flintc.bench.verify import leaving
from flintc.errors import CheckpointError, UsageError
from flintc.ir.graph import Graph, Launch
from flintc.passes import BASELINE
from flintc.reference import Context, Nvfp4, run_op

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """How to run a step: on which backend, after which pass (None: all), in steps of how many rows."""

    backend: str
    after: str | None = None
    batch: int = 8

    def __str__(self) -> str:
        return self.backend + (f"@{self.after}" if self.after else "") + f"/{self.batch}"


@dataclass(frozen=True, slots=True)
class Bisection:
    """What was compared; ``found`` is the first difference beyond its bound, in layer ``layer`` of the second run."""

    first: str
    second: str
    launches: int
    values: int
    exact: bool
    found: Difference | None = None
    launch: str | None = None
    layer: int | None = None
    ops: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "first": self.first, "second": self.second, "launches": self.launches, "values": self.values,
            "exact": self.exact, "launch": self.launch, "layer": self.layer, "ops": list(self.ops),
            "difference": None if self.found is None else self.found.to_json(), "passed": self.found is None,
        }  # fmt: skip


def parse_run(text: str) -> Run:
    """``interpret@attention-merge/4``: backend, pass, rows; the last two may be left out. UsageError."""
    front, slash, rows = text.partition("/")
    backend, _, after = front.partition("@")
    if backend not in BACKENDS or (slash and rows not in ("1", "2", "4", "8")):
        raise UsageError(
            f"--run {text!r} is neither BACKEND[@PASS][/BATCH] nor a saved trace",
            remedy=f"backends are {', '.join(BACKENDS)}, batches 1, 2, 4, 8, passes those of the spec and {BASELINE}",
        )
    return Run(backend, after or None, int(rows) if slash else 8)


@dataclass(frozen=True)
class Trace:
    """A run of a step: what it was given (weights and tables left out), and every value it made."""

    name: str
    inputs: StepInputs
    made: Mapping[str, Tensor]
    exact_for: Run | None = None

    def to(self, device: str) -> Trace:
        """The same on ``device``."""
        made = {name: tensor.to(device) for name, tensor in self.made.items()}
        return replace(self, inputs=self.inputs.to(device), made=made)


def trace_run(run: Run, runner: Runner, inputs: StepInputs) -> Trace:
    """Run the step."""
    exact = run if run.backend != "reference" else None
    return Trace(str(run), inputs, run_in_groups(runner, inputs, run.batch), exact)


def bisect(subject: Subject, first: Trace, second: Run, runner: Runner, progress: Progress | None = None) -> Bisection:
    """Compare ``first`` with ``second``, launch by launch of the latter.

    Kernels of one backend after one pass must agree bit for bit, whatever the batch; all else within rounding.
    """
    graph = runner.graph
    baseline = subject.graph(BASELINE)
    values = complete(baseline, first, runner.device)
    # What the first run kept in registers was rounded there, and once more, differently perhaps, to be completed here.
    kept = roundings(baseline, baseline.ops, known=first.made)
    hidden = {v: n for v, n in kept.items() if v not in first.made}
    exact = first.exact_for is not None and replace(first.exact_for, batch=second.batch) == second
    launches = compared = 0
    for launch in graph.launches:
        launches += 1
        got = forced(runner, launch, first.inputs, values, second.batch)
        depth = hidden | {v: max(n, kept[v]) for v, n in roundings(graph, launch.ops).items()}
        for name in (n for n in leaving(graph, launch) if n in got):
            compared += 1
            want = values[name]
            assert isinstance(want, Tensor)
            limit = torch.zeros_like(want, dtype=torch.float32)
            found = (
                difference(name, got[name], want, limit)
                if exact
                else compare_value(graph, launch, name, got[name], values, depth)
            )
            if not found.passed:
                layer = graph.ops[graph.producers[name]].layer
                return Bisection(
                    first.name, str(second), launches, compared, exact, found, launch.name, layer, launch.ops
                )
        if progress is not None:
            progress(launches, len(graph.launches), launch.name)
    return Bisection(first.name, str(second), launches, compared, exact)


def forced(runner: Runner, launch: Launch, inputs: StepInputs, values: Values, batch: int) -> dict[str, Tensor]:
    """What ``launch`` makes of the values of another run, in steps of ``batch`` rows."""
    graph = runner.graph
    caches = {
        name: tensor.clone()
        for name in graph.reads(launch)
        if graph.values[name].kind == "cache" and isinstance(tensor := values[name], Tensor)
    }
    parts = []
    for start, part in enumerate(groups(inputs, batch)):
        rows = slice(start * batch, start * batch + part.rows)
        given = {**values, **part.values, **_rows(graph, launch, values, rows), **caches}
        parts.append(runner.run(launch, given, part.env) | new_caches(graph, launch, given))
    return join(graph, parts)


def _rows(graph: Graph, launch: Launch, values: Values, rows: slice) -> dict[str, Tensor]:
    """The activations that ``launch`` reads, some rows of them."""
    reads = (n for n in graph.reads(launch) if graph.values[n].kind == "activation")
    return {name: t[rows].contiguous() for name in reads if isinstance(t := values[name], Tensor)}


def complete(graph: Graph, trace: Trace, device: str) -> dict[str, Tensor | Nvfp4]:
    """Every value of ``graph`` in a run: what it did not store is computed by the reference from what it did."""
    values: dict[str, Tensor | Nvfp4] = {**trace.inputs.values, **{k: t.to(device) for k, t in trace.made.items()}}
    context = Context("rounded")
    for op in graph.ops.values():
        if any(name not in values for name in op.outputs):
            made = run_op(op, values, context)
            values.update({name: t for name, t in made.items() if name not in values})
    return values


def save_trace(path: Path, trace: Trace, graph: Graph) -> None:
    """One safetensors file, whole or not at all: ``given/NAME`` and ``made/NAME``, the symbols in its metadata."""
    caches = set(graph.first_versions.values())
    kept = {v.name for v in graph.values.values() if v.kind == "input"} | caches
    given = {f"given/{n}": t for n, t in trace.inputs.values.items() if n in kept and isinstance(t, Tensor)}
    made = {f"made/{n}": t for n, t in trace.made.items()}
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in {**given, **made}.items()}
    temporary = path.with_name(f".{path.name}.part")
    metadata = {"env": json.dumps(trace.inputs.env), "run": trace.name, "graph": graph.name}
    try:
        save_file(stored, temporary, metadata=metadata)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_trace(path: Path, subject: Subject, device: str = "cpu") -> Trace:
    """A saved trace, with the weights and tables of ``subject``; CheckpointError where the file is none."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        env = {str(k): int(v) for k, v in json.loads(metadata["env"]).items()}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not a trace of flintc verify: {error}") from None
    given = {n.removeprefix("given/"): t for n, t in stored.items() if n.startswith("given/")}
    made = {n.removeprefix("made/"): t for n, t in stored.items() if n.startswith("made/")}
    tables = subject.tables(subject.graph(BASELINE), env["C"], device)
    values: dict[str, Tensor | Nvfp4] = {**subject.weights_on(device), **tables, **given}
    return Trace(f"{metadata.get('run', '?')} ({path.name})", StepInputs(values, env), made)
