"""What is set aside for a chunk covers what it takes: at Flint's full width, on tensors that have no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flintc import api
from flintc.codegen.general import general
from flintc.ir.plan import Kernel, Plan
from flintc.ir.types import resolve
from flintc.runtime.kv import KvCache, KvLayout
from flintc.runtime.prefill.memory import chunk_bytes, router_bytes
from flintc.runtime.prefill.path import GeneralPath
from flintc.runtime.values import TORCH_DTYPES
from flintc.spec import load_spec


class Held(TorchDispatchMode):
    """Counts the bytes of tensors made while it is on, from when they are made until they are gone."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._hold(tensor.untyped_storage())
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage._cdata)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def no_launch(kernel: Kernel, grid: tuple[int, int, int], **arguments: Tensor | int) -> None:
    """What kernels write has been made before them."""


@pytest.mark.parametrize(("rows", "context"), [(8192, 262144), (2048, 262144), (8192, 8192), (300, 1000)])
def test_a_chunk_takes_no_more_than_is_set_aside(rows: int, context: int) -> None:
    graph = api.run_passes(api._resized(load_spec("flint"), {"layers": 4}), "bf16", stop_after="baseline").graph
    made = general(graph)
    assert made is not None
    kv = KvCache(KvLayout.from_graph(graph), context, 1)
    env = {"B": 1, "Q": 1, "T": kv.tables["block_table"].shape[1], "P": kv.pages, "C": context}
    given: Mapping[str, Tensor] = {
        v.name: torch.empty([resolve(d, env) for d in v.type.shape], dtype=TORCH_DTYPES[v.type.dtype], device="meta")
        for v in graph.values.values()
        if v.kind in ("weight", "table") or (v.kind == "cache" and v.name not in graph.producers)
    }
    path = GeneralPath(Plan(graph, {}, (), {}, {}, {}, general=made), no_launch, given, kv, rows)
    slot = kv.add(context)
    kv.extend(slot, context - rows, sliced=False)
    with Held(given.values()) as held:
        (hidden,) = path.chunks(slot, [1] * rows)
        for piece in path.logits(hidden):
            piece.log_softmax(-1)
    aside = chunk_bytes(graph, made, rows, context) + router_bytes(graph, made)
    assert 0.5 * aside < held.most <= aside
