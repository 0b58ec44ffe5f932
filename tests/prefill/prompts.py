"""General paths of small models on the CPU, their kernels in Triton's interpreter, beside the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flintc import api
from flintc.bench.synthetic import tensors
from flintc.codegen.general import general
from flintc.ir.build import Weights
from flintc.ir.graph import Graph
from flintc.ir.plan import Plan
from flintc.reference import Nvfp4
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.prefill.launch import InterpretedLaunch
from flintc.runtime.prefill.path import GeneralPath
from flintc.runtime.storage import KvStorage
from flintc.runtime.values import for_kernels
from flintc.spec import bind_defaults, load_spec

CONTEXT, SLOTS = 96, 2
DATA = Path(__file__).parents[1] / "data"


@cache
def graph_of(spec: str, weights: Weights) -> Graph:
    """The baseline graph of a shipped spec, or of one in the tests' data."""
    file = DATA / f"{spec}.yaml"
    model = bind_defaults(load_spec(file if file.is_file() else spec))
    return api.run_passes(model, weights, stop_after="baseline").graph


@cache
def weights_of(spec: str, weights: Weights) -> Mapping[str, Tensor | Nvfp4]:
    """Random weights and tables by value name."""
    graph = graph_of(spec, weights)
    sizes = {"B": 1, "Q": 1, "T": 1, "P": 1, "C": CONTEXT}
    made = tensors(graph, sizes, 10000.0, "cpu", 0)
    return {name: t for name, t in made.items() if graph.values[name].kind in ("weight", "table")}


@cache
def _planned(spec: str, weights: Weights) -> tuple[Plan, InterpretedLaunch]:
    graph = graph_of(spec, weights)
    made = general(graph)
    assert made is not None
    return Plan(graph, {}, (), {}, {}, {}, general=made), InterpretedLaunch(made.kernels)


def make_path(spec: str, weights: Weights, chunk: int, slots: int = SLOTS) -> tuple[GeneralPath, KvStorage]:
    """A path with an empty cache of its own."""
    plan, launch = _planned(spec, weights)
    kv = KvCache(KvLayout.from_graph(plan.graph), CONTEXT, slots)
    storage = KvStorage(kv, torch.bfloat16, whole=True)
    given = {**for_kernels(weights_of(spec, weights)), **storage.tensors}
    return GeneralPath(plan, launch, given, kv, chunk), storage


def logits(path: GeneralPath, slot: int, ids: Sequence[int]) -> Tensor:
    """Logits of the next tokens of ``slot``, which must have been added."""
    return torch.cat([part for hidden in path.chunks(slot, ids) for part in path.logits(hidden)])


def divergence(want: Tensor, got: Tensor) -> Tensor:
    """KL(want || got) of each row's distribution."""
    a, b = want.log_softmax(-1), got.log_softmax(-1)
    kl: Any = (a.exp() * (a - b)).sum(-1)
    return kl  # type: ignore[no-any-return]


def random_ids(graph: Graph, count: int, seed: int = 0) -> list[int]:
    """Token ids of ``graph``'s vocabulary."""
    vocab = graph.values[graph.outputs[0]].type.shape[-1]
    assert isinstance(vocab, int)
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
