"""Graphs for tests of the IR and the passes: small ones drawn by hand, and those of whole specs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from flintc.ir.build import Weights, build
from flintc.ir.graph import Attr, Crossing, Graph, Launch, Op, Value, ValueKind
from flintc.ir.lower import lower_attention
from flintc.ir.ops import OPS, infer
from flintc.ir.types import DType, TensorType
from flintc.passes import PASSES, PipelineRun, run_pipeline
from flintc.spec import bind_defaults, load_spec

OTHER = str(Path(__file__).parent / "data" / "other.yaml")


@cache
def baseline(spec: str, weights: Weights = "bf16") -> Graph:
    """The graph of a spec before the first pass."""
    model = bind_defaults(load_spec(spec))
    numerics = model.spec.numerics
    cut = numerics.attention_chunk, numerics.window_chunk, numerics.attention_partials
    return lower_attention(build(model, weights), *cut)


@cache
def pipeline(spec: str, weights: Weights = "bf16") -> PipelineRun:
    """Every prefix of the whole pipeline."""
    return run_pipeline(baseline(spec, weights), list(PASSES))


@dataclass
class Sketch:
    """Draws a graph op by op; output types come from the ops' own inference, launches hold one op each."""

    values: dict[str, Value] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    tiles: dict[str, int] = field(default_factory=dict)

    def given(self, name: str, dtype: DType, *shape: int | str, kind: ValueKind = "input") -> str:
        """A value from outside."""
        self.values[name] = Value(name, TensorType(dtype, shape), kind)
        return name

    def weight(self, name: str, dtype: DType, *shape: int) -> str:
        """A weight."""
        return self.given(name, dtype, *shape, kind="weight")

    def cached(self) -> None:
        """A cache of two heads of 16 channels, and what places rows in it: ``positions``, ``seqs``, ``table``."""
        for name in ("positions", "seqs"):
            self.given(name, "i32", "B")
        self.given("table", "i32", "Q", "T")
        self.given("cache", "bf16", "P", 2, 2, 8, 16, kind="cache")

    def op(self, name: str, kind: str, inputs: Sequence[str], outputs: str, **attrs: Attr) -> None:
        """An op; ``outputs`` names its values, separated by spaces."""
        defaults = {k: v for k, v in OPS[kind].attrs.items() if v is not ...}
        full: dict[str, Attr] = {**defaults, **attrs}  # type: ignore[dict-item]
        names = tuple(outputs.split())
        for value, type in zip(names, infer(kind, tuple(self.values[v].type for v in inputs), full), strict=True):
            self.values[value] = Value(value, type, "cache" if kind == "kv_write" else "activation")
        self.ops[name] = Op(name, kind, tuple(inputs), names, full)

    def graph(self, *outputs: str) -> Graph:
        """One launch per op; GEMVs have 16-row tiles."""
        gemv = ("linear", "router", "expert_linear")
        launches = [Launch(o.name, o.kind, (o.name,), tile=16 if o.kind in gemv else None) for o in self.ops.values()]
        return Graph("sketch", self.values, self.ops, tuple(launches), outputs)

    def fused(self, outputs: Sequence[str], role: str, ops: str, *crossings: Crossing, tile: int = 16) -> Graph:
        """``ops`` in one launch named like its role, at the place of the last of them; the others alone."""
        graph = self.graph(*outputs)
        names = tuple(ops.split())
        joined = Launch(role, role, names, crossings, tile)
        launches = [joined if x.name == names[-1] else x for x in graph.launches if x.name not in names[:-1]]
        return graph.with_launches(tuple(launches))


def partition(graph: Graph) -> str:
    """Launches in order: ``embed | add_norm(add norm) | qkv(...)``; a lone op by its name."""
    return " | ".join(x.ops[0] if len(x.ops) == 1 else f"{x.role}({' '.join(x.ops)})" for x in graph.launches)


def crossings(graph: Graph, role: str) -> dict[str, str]:
    """How each inner value of the one launch of ``role`` crosses, the group after a colon."""
    (launch,) = (x for x in graph.launches if x.role == role)
    return {c.value: c.kind + (f":{c.group}" if c.group else "") for c in launch.crossings}
