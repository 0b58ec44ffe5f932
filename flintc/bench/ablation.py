"""What each pass of a pipeline saves, derived from the graph after it: launches, bytes, estimated time, redundancy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from flintc.errors import UsageError
from flintc.ir.cost import Cost, decode_env, evaluations, graph_cost, launch_cost
from flintc.ir.graph import Attr, Graph, Launch
from flintc.passes import PipelineRun, Step

#: Bytes per second that an H200 reads with a plain kernel (measured; 97 % of the datasheet).
READ_BANDWIDTH = 4.64e12
#: Seconds that one more tiny kernel adds to a chain of them in a CUDA graph on an H200 (measured), plain and with
#: dependent launch triggered early; a trigger below the wait is taken to be as good.
PLAIN_LAUNCH, DEPENDENT_LAUNCH = 1.5e-6, 1.05e-6
#: The kind of each op of a layer, and its attention window.
_Structure = tuple[tuple[str, Attr], ...]

#: Tokens of context, those of the published result.
CONTEXT = 100_000


@dataclass(frozen=True, slots=True)
class Redundant:
    """The launch that does most arithmetic more than once: done / needed, and how often it evaluates which ops."""

    launch: str
    factor: float
    evaluations: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AblationStep:
    """One prefix of the pipeline. Counts and costs leave the head out; times are in seconds.

    ``merged``: ops that share a launch with others. ``matches``: by rule of the step's pass.
    ``seconds`` (median), ``p99_seconds``, ``launches_profiled``, ``kl_fp32`` and ``kl_baseline`` are measurements, None
    where there is none; the latter two are means over ``kl_positions`` positions.
    """

    name: str
    launches: int
    per_layer: Mapping[int, int]
    merged: int
    matches: Mapping[str, int]
    cost: Cost
    bytes_seconds: float
    launch_seconds: float
    redundant: Redundant | None
    seconds: float | None = None
    p99_seconds: float | None = None
    launches_profiled: int | None = None
    kl_fp32: float | None = None
    kl_baseline: float | None = None
    kl_positions: int | None = None

    @property
    def estimate(self) -> float:
        """Estimated seconds: bytes at the named bandwidth, and a fixed latency per launch. Not a measurement."""
        return self.bytes_seconds + self.launch_seconds


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of equal structure before the first pass."""

    label: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ablation:
    """Every prefix of one pipeline for one spec, at one context length and batch."""

    spec: str
    weights: str
    context: int
    batch: int
    bandwidth: float
    launches_head: int
    kinds: tuple[LayerKind, ...]
    steps: tuple[AblationStep, ...]
    #: Bytes per second of a plain read, measured in the same run as the times.
    ceiling: float | None = None

    @property
    def fewest(self) -> AblationStep:
        """The step of fewest launches, of several the last: how far joining them goes."""
        return min(reversed(self.steps), key=lambda step: step.launches)

    @property
    def has_times(self) -> bool:
        """Whether any step was measured."""
        return any(step.seconds is not None for step in self.steps)

    @property
    def has_accuracy(self) -> bool:
        """Whether the KL of any step was measured."""
        return any(step.kl_fp32 is not None for step in self.steps)

    def measured(self, step: str, **figures: float) -> Ablation:
        """The same with measured fields of one step (see :class:`AblationStep`) filled in."""
        steps = tuple(replace(s, **figures) if s.name == step else s for s in self.steps)  # type: ignore[arg-type]
        return replace(self, steps=steps)

    def beside(self, ceiling: float) -> Ablation:
        """The same with the read ceiling, in bytes per second, that its times are set beside."""
        return replace(self, ceiling=ceiling)

    def share(self, step: AblationStep) -> float | None:
        """Share of the read ceiling that a measured step reaches: bytes over time over ceiling."""
        if step.seconds is None or self.ceiling is None:
            return None
        return step.cost.bytes / step.seconds / self.ceiling

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc ablate --json`` prints."""
        return {
            "spec": self.spec,
            "weights": self.weights,
            "context": self.context,
            "batch": self.batch,
            "bandwidth_bytes_per_second": self.bandwidth,
            "read_ceiling_bytes_per_second": self.ceiling,
            "launches_head": self.launches_head,
            "layer_kinds": {kind.label: list(kind.layers) for kind in self.kinds},
            "steps": [{**_step_json(step), "share_of_ceiling": self.share(step)} for step in self.steps],
        }


def ablate(run: PipelineRun, *, context: int = CONTEXT, batch: int = 1, bandwidth: float = READ_BANDWIDTH) -> Ablation:
    """Derive the ablation of ``run`` for a decode step of ``batch`` rows with ``context`` tokens each.

    ``bandwidth`` in bytes per second. UsageError where one of the three is not positive.
    """
    for name, value in (("context", context), ("batch", batch), ("bandwidth", bandwidth)):
        if not 0 < value < math.inf:
            raise UsageError(f"{name} must be positive, not {value}")
    baseline = run.steps[0].graph
    env = decode_env(baseline, context, batch)
    return Ablation(
        baseline.name,
        _weights(baseline),
        context,
        batch,
        bandwidth,
        len(run.graph.launches) - len(run.graph.body),
        layer_kinds(baseline),
        tuple(_step(step, env, bandwidth) for step in run.steps),
    )


def layer_kinds(graph: Graph) -> tuple[LayerKind, ...]:
    """Layers grouped by the kinds of their ops, the attention's window included."""
    groups: dict[_Structure, list[int]] = {}
    for layer in graph.layers():
        ops = [graph.ops[o] for launch in graph.layer_launches(layer) for o in launch.ops]
        groups.setdefault(tuple((op.kind, op.attrs.get("window")) for op in ops), []).append(layer)
    return tuple(LayerKind(_label(key, layers), tuple(layers)) for key, layers in groups.items())


def ablation_table(ablation: Ablation) -> Group:
    """The ablation for a terminal: launches, then what they cost."""
    title = (
        f"{ablation.spec}, {ablation.weights} weights, {ablation.context:,} tokens of context, batch {ablation.batch}\n"
        f"head ({ablation.launches_head} launch) and sampling counted apart"
    )
    launches = _table(title=title)
    for heading in (*(_heading(kind) for kind in ablation.kinds), "launches", "change"):
        launches.add_column(heading, justify="right")
    costs = _table(caption=estimate_note(ablation))
    measured = ("measured\nms",) if ablation.has_times else ()
    share = ("of\nceiling",) if ablation.ceiling is not None else ()
    # What is written is little; its column makes room for the share where times are known.
    written = () if share else ("MB\nwritten",)
    for heading in ("ops\nmerged", "MB\nread", *written, "redundancy", "est.\nms", *measured, *share):
        costs.add_column(heading, justify="right")
    before = ablation.steps[0].launches
    for step in ablation.steps:
        per_kind = [str(step.per_layer[kind.layers[0]]) for kind in ablation.kinds]
        change = f"{step.launches - before:+,}" if step.launches != before else "-"
        launches.add_row(step.name, *per_kind, f"{step.launches:,}", change)
        costs.add_row(*_cost_row(step, ablation))
        before = step.launches
    return Group(launches, costs, *([accuracy_table(ablation)] if ablation.has_accuracy else []))


def accuracy_table(ablation: Ablation) -> Table:
    """What each pass costs in accuracy."""
    positions = max(step.kl_positions or 0 for step in ablation.steps)
    table = _table(caption=f"mean KL of next-token distributions at {positions:,} positions of real text, in nats")
    for heading in ("KL from FP32", "KL from baseline"):
        table.add_column(heading, justify="right")
    for step in ablation.steps:
        cells = ("-" if x is None else f"{x:.3e}" for x in (step.kl_fp32, step.kl_baseline))
        table.add_row(step.name, *cells)
    return table


def _table(title: str | None = None, caption: str | None = None) -> Table:
    """A table narrow enough for 80 columns; its first column is never cut."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title_justify = table.caption_justify = "left"
    table.add_column("after pass", no_wrap=True)
    return table


def estimate_note(ablation: Ablation) -> str:
    """What the estimated times are made of."""
    return (
        f"estimate: bytes at {ablation.bandwidth / 1e12:.2f} TB/s plus {PLAIN_LAUNCH * 1e6:.2f} us a launch, "
        f"{DEPENDENT_LAUNCH * 1e6:.2f} us a dependent one, 0 an arrival within one; computed, not measured"
    )


def added_note(ablation: Ablation) -> str:
    """``split-arrivals adds 145 launches to save time: 490``: steps that add to the fewest launches; empty for none."""
    steps = ablation.steps[ablation.steps.index(ablation.fewest) :]
    return "; ".join(
        f"{step.name} adds {step.launches - before.launches:,} launches to save time: {step.launches:,}"
        for before, step in pairwise(steps)
        if step.launches > before.launches
    )


def redundancy_text(worst: Redundant | None) -> str:
    """``1.73 (L2.route)``: the highest redundancy of a launch."""
    return f"{worst.factor:.2f} ({worst.launch})" if worst else "1"


def _cost_row(step: AblationStep, ablation: Ablation) -> list[str]:
    cells = [
        step.name,
        str(step.merged or "-"),
        f"{step.cost.bytes_read / 1e6:,.1f}",
    ]
    if ablation.ceiling is None:
        cells.append(f"{step.cost.bytes_written / 1e6:,.1f}")
    cells += [redundancy_text(step.redundant), f"{step.estimate * 1e3:.3f}"]
    if ablation.has_times:
        cells.append("-" if step.seconds is None else f"{step.seconds * 1e3:.3f}")
    if ablation.ceiling is not None:
        share = ablation.share(step)
        cells.append("-" if share is None else f"{share:.0%}")
    return cells


def _step(step: Step, env: Mapping[str, int], bandwidth: float) -> AblationStep:
    graph = step.graph
    cost = graph_cost(graph, env, graph.body)
    return AblationStep(
        name=step.name,
        launches=len(graph.body),
        per_layer={layer: len(graph.layer_launches(layer)) for layer in graph.layers()},
        merged=sum(len(launch.ops) for launch in graph.body if len(launch.ops) > 1),
        matches={count.rule: count.matched for count in step.matches},
        cost=cost,
        bytes_seconds=cost.bytes / bandwidth,
        launch_seconds=sum(_latency(launch) for launch in graph.body),
        redundant=_worst(graph, env),
    )


def _latency(launch: Launch) -> float:
    overlaps = launch.dependent is not None and launch.dependent.trigger != "late"
    return DEPENDENT_LAUNCH if overlaps else PLAIN_LAUNCH


def _worst(graph: Graph, env: Mapping[str, int]) -> Redundant | None:
    """The launch of highest redundancy, the first of its kind; None where nothing is done twice."""
    worst, factor = None, 1.0
    for launch in graph.body:
        redundancy = launch_cost(graph, launch, env).redundancy
        if redundancy > factor:
            worst, factor = launch, redundancy
    if worst is None:
        return None
    times = {o: evaluations(graph, worst, o) for o in worst.ops}
    return Redundant(worst.name, factor, {o: n for o, n in times.items() if n > 1})


def _weights(graph: Graph) -> str:
    """Element types of the linear weights: ``bf16``, ``nvfp4``."""
    linears = [op for op in graph.ops.values() if op.kind in ("linear", "expert_linear")]
    return " and ".join(sorted({graph.values[op.inputs[-1]].type.dtype for op in linears}))


def _heading(kind: LayerKind) -> str:
    """The label over four lines, so that the column is no wider than a word."""
    return kind.label.replace(", ", "\n").replace(" layers", "\nlayers")


def _label(key: _Structure, layers: list[int]) -> str:
    mlp = "MoE" if any(kind == "expert_linear" for kind, _ in key) else "dense"
    attention = "sliding" if any(window is not None for _, window in key) else "full"
    where = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    return f"{mlp}, {attention}, {where}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _step_json(step: AblationStep) -> dict[str, Any]:
    worst = step.redundant
    return {
        "pass": step.name,
        "launches_total": step.launches,
        "launches_per_layer": {str(layer): n for layer, n in step.per_layer.items()},
        "bytes": step.cost.bytes,
        "ms": _ms(step.seconds),
        "ms_p99": _ms(step.p99_seconds),
        "launches_profiled": step.launches_profiled,
        "kl_fp32": step.kl_fp32,
        "kl_baseline": step.kl_baseline,
        "kl_positions": step.kl_positions,
        "bytes_read": step.cost.bytes_read,
        "bytes_written": step.cost.bytes_written,
        "ops_merged": step.merged,
        "matches": dict(step.matches),
        "redundancy": step.cost.redundancy,
        "redundancy_worst": worst and {
            "launch": worst.launch, "factor": worst.factor, "evaluations": dict(worst.evaluations),
        },
        "estimated_ms": step.estimate * 1e3,
        "estimated_ms_bytes": step.bytes_seconds * 1e3,
        "estimated_ms_launches": step.launch_seconds * 1e3,
    }  # fmt: skip
