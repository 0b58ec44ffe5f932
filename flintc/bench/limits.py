"""What stands between a step and its bytes: long attention by tokens, layers read from L2, launches that only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flintc.bench.built import step_of
from flintc.bench.ceiling import read_ceiling, read_launches
from flintc.errors import UsageError
from flintc.ir.cost import decode_env, launch_cost
from flintc.ir.graph import Graph, Launch

#: Shares of the context that the long attention is timed at.
SHARES = (0.0, 0.005, 0.04, 0.125, 0.25, 0.5, 0.75, 1.0)
#: Programs of a launch that only reads.
PROGRAMS = (132, 264, 528, 1056, 2112)
#: Layers that come again and again: their weights stay in L2.
REPEATED = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured in one run, one row; times in microseconds.

    attention: of a long attention launch, in a chain of its own, by the tokens that the sequence holds. layer,
    layer_cached: of a layer with experts, in a chain of all of them, and of REPEATED of them over and over. reads:
    bytes and time of a launch that only reads what a long attention reads at ``context`` tokens, by programs. ceiling:
    bytes per second of a plain read.
    """

    spec: str
    weights: str
    context: int
    gpu: str
    ceiling: float
    attention: Mapping[int, float]
    layer: float
    layer_cached: float
    reads: Mapping[int, tuple[int, float]]

    def to_json(self) -> dict[str, Any]:
        """The object that ``flintc bench limits --json`` prints."""
        return {
            "spec": self.spec, "weights": self.weights, "context": self.context, "gpu": self.gpu,
            "read_ceiling_bytes_per_second": self.ceiling,
            "attention_us_by_tokens": {str(n): us for n, us in self.attention.items()},
            "layer_us": self.layer, "layer_us_read_from_l2": self.layer_cached,
            "reads_by_programs": {str(n): {"bytes": nbytes, "us": us} for n, (nbytes, us) in self.reads.items()},
        }  # fmt: skip


def measure_limits(spec: str, weights: str, bundle: Path | None, context: int) -> Limits:
    """Measure a step of one sequence of ``context`` tokens with synthetic weights, part by part.

    BackendError without a GPU; UsageError where no layer sees everything, or none has experts.
    """
    built, bench = step_of(spec, weights, bundle, context)
    graph = built.plan.graph
    long, layers = long_attention(graph), layers_with_experts(graph)
    kernel = next(p.kernel for p in built.plan.launches if p.name == long.name)
    attention = {n: bench.time_chain(kernel, tokens=n) for n in lengths(context)}
    few = layers[:REPEATED]
    layer, cached = bench.time_layers(layers), bench.time_layers(few, max(1, len(layers) // len(few)))
    nbytes = launch_cost(graph, long, decode_env(graph, context)).bytes_read
    count = sum(p.kernel == kernel for p in built.plan.launches)
    reads = {programs: read_launches(nbytes, count, programs) for programs in PROGRAMS}
    gpu = torch.cuda.get_device_name()
    return Limits(graph.name, weights, context, gpu, read_ceiling(), attention, layer, cached, reads)


def lengths(context: int) -> tuple[int, ...]:
    """Tokens at SHARES of ``context``, each once."""
    return tuple(dict.fromkeys(max(1, int(context * share)) for share in SHARES))


def long_attention(graph: Graph) -> Launch:
    """The first launch whose attention sees everything; UsageError where there is none."""
    for launch in graph.launches:
        ops = [graph.ops[o] for o in launch.ops]
        if any(op.kind == "attention_partial" and op.attrs["window"] is None for op in ops):
            return launch
    raise UsageError(f"no layer of {graph.name} sees everything: there is no long attention to time")


def layers_with_experts(graph: Graph) -> Sequence[int]:
    """Layers that choose among experts; UsageError where there is none."""
    kinds = {n: {graph.ops[o].kind for x in graph.layer_launches(n) for o in x.ops} for n in graph.layers()}
    if not (found := [n for n, ops in kinds.items() if "expert_linear" in ops]):
        raise UsageError(f"no layer of {graph.name} has experts")
    return found
