"""One function per kind of routine: from the values it reads to those it makes, over all rows of a chunk.

A function is given the fixed tensors, its routine, the chunk and the activations by name, to which it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from flintc.ir.graph import Op
from flintc.ir.packed import LANE_COLUMNS, in_blocks
from flintc.ir.plan import Kernel, Plan, Routine
from flintc.reference.nvfp4 import Nvfp4
from flintc.runtime.prefill.chunk import Chunk
from flintc.runtime.prefill.launch import Launch
from flintc.runtime.prefill.products import ScaleRange, bf16_parts, in_word_order, product, scale_ranges
from flintc.runtime.values import TORCH_DTYPES

Values = dict[str, Tensor]
#: What an unpacked weight must be multiplied by: see flintc/codegen/device/unpack.py.
UNPACKED_UNIT = 128.0


class Rows(Protocol):
    """What is asked of rows by routines that do not care whose they are."""

    @property
    def ids(self) -> Tensor:
        """Tokens, i32[rows]."""
        ...

    @property
    def rows(self) -> int:
        """How many there are."""
        ...


class Given:
    """Weights, tables and caches of a plan by value name, and what is derived from them once."""

    def __init__(self, plan: Plan, launch: Launch, tensors: Mapping[str, Tensor | Nvfp4]) -> None:
        assert plan.general is not None
        self.graph = plan.graph
        self.launch = launch
        self._kernels = plan.general.kernels
        self._ops = {routine.name: self._by_kind(routine) for routine in plan.general.routines}
        self._tensors = tensors
        self._first = plan.graph.first_versions
        self._scales: dict[str, list[ScaleRange]] = {}
        self._parts: dict[str, Tensor] = {}

    def ops(self, routine: Routine) -> Mapping[str, list[Op]]:
        """The routine's ops by kind, in order."""
        return self._ops[routine.name]

    def _by_kind(self, routine: Routine) -> dict[str, list[Op]]:
        found: dict[str, list[Op]] = {}
        for name in routine.ops:
            op = self.graph.ops[name]
            found.setdefault(op.kind, []).append(op)
        return found

    def kernel(self, routine: Routine, purpose: str = "run") -> Kernel:
        """The routine's kernel for ``purpose``."""
        return self._kernels[routine.kernels[purpose]]

    def tensor(self, name: str) -> Tensor:
        """A tensor that is not packed; any version of a cache is its memory."""
        tensor = self._tensors[self._first.get(name, name)]
        assert isinstance(tensor, Tensor)
        return tensor

    def packed(self, name: str) -> Nvfp4:
        """A packed weight as it is."""
        weight = self._tensors[name]
        assert isinstance(weight, Nvfp4)
        return weight

    def weight(self, routine: Routine, name: str) -> tuple[Tensor, Tensor | None]:
        """A weight in BF16, and the scale of each of its rows (None: 1): a packed one is unpacked anew."""
        weight = self._tensors[name]
        if isinstance(weight, Tensor):
            return weight, None
        unpacked = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        kernel = self.kernel(routine, "unpack")
        lanes, row = unpacked.numel() // LANE_COLUMNS, weight.shape[-1] // LANE_COLUMNS
        grid = (cdiv(lanes, kernel.constants["LANES"]), 1, 1)
        arguments = {"lanes": lanes, "row": row if in_blocks(*weight.shape[-2:]) else 0}
        self.launch(kernel, grid, codes=weight.codes, scales=weight.scales, y=unpacked, **arguments)
        return unpacked, weight.scale

    def scales(self, name: str, scale: Tensor | None) -> list[ScaleRange] | None:
        """Ranges of the rows of a weight with equal scales, for unpacked values."""
        if scale is None:
            return None
        if name not in self._scales:
            self._scales[name] = [(a, b, s * UNPACKED_UNIT) for a, b, s in scale_ranges(scale)]
        return self._scales[name]

    def router(self, routine: Routine, name: str) -> Tensor:
        """An FP32 weight as BF16 parts, its columns in the order of the rows that it meets."""
        if name not in self._parts:
            parts = bf16_parts(self.tensor(name), int(self.kernel(routine, "topk").constants["PARTS"]))
            packed = "codes_ptr" in (p.name for p in self.kernel(routine, "gate_up").params)
            self._parts[name] = in_word_order(parts) if packed else parts
        return self._parts[name]


def embed(given: Given, routine: Routine, chunk: Rows, values: Values) -> None:
    """Rows of the embedding table."""
    (op,) = given.ops(routine)["embed"]
    values[op.outputs[0]] = given.tensor(op.inputs[1]).index_select(0, chunk.ids)


def norm(given: Given, routine: Routine, chunk: Rows, values: Values) -> None:
    """[sum over experts, shared expert,] [residual add,] norm."""
    ops = given.ops(routine)
    arguments: dict[str, Tensor] = {}
    x = ops["norm"][0].inputs[0]
    if "add" in ops:
        (add,) = ops["add"]
        x, residual = add.inputs
        arguments["residual"] = values[residual]
        values[add.outputs[1]] = arguments["residual_out"] = torch.empty_like(values[residual])
    if "combine" in ops:
        experts, weights = ops["combine"][0].inputs
        arguments |= {"experts": values[experts], "weights": values[weights]}
        if "sum" in ops:
            (shared,) = set(ops["sum"][0].inputs) - set(ops["combine"][0].outputs)
            arguments["shared"] = values[shared]
    else:
        arguments["x"] = values[x]
    (op,) = ops["norm"]
    kernel = given.kernel(routine)
    y = torch.empty((chunk.rows, int(kernel.constants["WIDTH"])), dtype=torch.bfloat16, device=chunk.ids.device)
    given.launch(kernel, (chunk.rows, 1, 1), **arguments, weight=given.tensor(op.inputs[1]), y=y)
    values[op.outputs[0]] = y


def linear(given: Given, routine: Routine, chunk: Rows, values: Values) -> None:
    """A product with a dense weight."""
    (op,) = given.ops(routine)["linear"]
    values[op.outputs[0]] = dense(given, routine)(values[op.inputs[0]])


def dense(given: Given, routine: Routine) -> Callable[[Tensor], Tensor]:
    """A product with a dense weight as a function of its rows; a packed weight is unpacked now, for all calls."""
    (op,) = given.ops(routine)["linear"]
    weight, scale = given.weight(routine, op.inputs[1])
    dtype = TORCH_DTYPES[given.graph.values[op.outputs[0]].type.dtype]
    scales = given.scales(op.inputs[1], scale)
    return lambda x: product(x, weight, dtype, scales)


def silu(given: Given, routine: Routine, chunk: Rows, values: Values) -> None:
    """The gated activation."""
    (op,) = given.ops(routine)["silu_mul"]
    x, kernel = values[op.inputs[0]], given.kernel(routine)
    y = x.new_empty((x.shape[0], x.shape[1] // 2))
    given.launch(kernel, (x.shape[0], cdiv(y.shape[1], kernel.constants["BLOCK"]), 1), x=x, y=y)
    values[op.outputs[0]] = y


def heads(given: Given, routine: Routine, chunk: Chunk, values: Values) -> None:
    """Queries, and keys and values: for the attention behind those that the cache holds, and into the cache.

    The value that the graph calls the cache stands for the attention's keys and values here.
    """
    (write,) = given.ops(routine)["kv_write"]
    cache, span = given.tensor(write.inputs[2]), chunk.spans[write.inputs[5]]
    kv = _held_keys(cache, span.pages, span.keys)
    finish_heads(
        given, routine, "run", values, block_table=span.table, kv=kv, cache=cache, start=chunk.start,
        offset=chunk.start - span.base, keys=span.keys, oldest=span.oldest, columns=len(span.table),
    )  # fmt: skip
    values[write.outputs[0]] = kv


def finish_heads(given: Given, routine: Routine, purpose: str, values: Values, **rows: Tensor | int) -> None:
    """Queries BF16 [rows, heads, head_dim], normed and rotated; keys and values go where ``rows`` says."""
    ops, kernel = given.ops(routine), given.kernel(routine, purpose)
    q, k = ops["head_norm"]
    x = values[q.inputs[0]]
    heads, kv_heads, head = (int(kernel.constants[name]) for name in ("HEADS", "KV_HEADS", "HEAD"))
    queries = torch.empty((x.shape[0], heads, head), dtype=torch.bfloat16, device=x.device)
    rotation = {"table": given.tensor(ops["rope"][0].inputs[3])} if "rope" in ops else {}
    given.launch(
        kernel, (x.shape[0], cdiv(heads + 2 * kv_heads, kernel.constants["BLOCK"]), 1),
        x=x, q_weight=given.tensor(q.inputs[1]), k_weight=given.tensor(k.inputs[1]), q=queries, **rotation, **rows,
    )  # fmt: skip
    values[ops["rope"][0].outputs[0] if "rope" in ops else q.outputs[0]] = queries


def _held_keys(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """Room for ``keys`` positions, bf16 [2, kv_heads, keys, head_dim], the first ``pages`` of them from the cache."""
    _, planes, heads, page, head = cache.shape
    kv = torch.empty((planes, heads, keys // page, page, head), dtype=cache.dtype, device=cache.device)
    if len(pages):
        kv[:, :, : len(pages)].copy_(cache.index_select(0, pages).permute(1, 2, 0, 3, 4))
    return kv.view(planes, heads, keys, head)


def attention(given: Given, routine: Routine, chunk: Chunk, values: Values) -> None:
    """Attention to all keys before each row and its own, or to a window of them."""
    ops = given.ops(routine)
    (partial,), (merge,) = ops["attention_partial"], ops["attention_merge"]
    span = chunk.spans[partial.inputs[4]]
    q, kv, kernel = values[partial.inputs[0]], values[partial.inputs[1]], given.kernel(routine)
    y = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    sinks = {"sinks": given.tensor(merge.inputs[5])} if len(merge.inputs) > 5 else {}
    grid = (cdiv(chunk.rows, kernel.constants["TOKENS"]), kv.shape[1], 1)
    given.launch(
        kernel, grid, q=q, kv=kv, **sinks, y=y, rows=chunk.rows, offset=chunk.start - span.base, keys=span.keys
    )
    values[merge.outputs[0]] = y


def experts(given: Given, routine: Routine, chunk: Rows, values: Values) -> None:
    """The chosen experts of each row: y [T, k, N] and their weights [T, k]."""
    ops = given.ops(routine)
    (router,), (topk,), (gate_up, down) = ops["router"], ops["topk"], ops["expert_linear"]
    h = values[router.inputs[0]]
    ids, weights, order, tiles = _group(given, routine, router, topk, h)
    values[topk.outputs[0]], values[topk.outputs[1]] = ids, weights
    shape = given.graph.values[gate_up.inputs[2]].type.shape
    inner = int(shape[1]) // 2
    act = h.new_empty((order.shape[0], inner))
    _grouped(given, routine, "gate_up", gate_up, h, act, order, tiles)
    y = h.new_empty((*ids.shape, h.shape[1]))
    _grouped(given, routine, "down", down, act, y, order, tiles)
    values[down.outputs[0]] = y


def _group(given: Given, routine: Routine, router: Op, topk: Op, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and weights of each row's experts [T, k], pairs in the order of experts, and the table of their tiles."""
    choose, group = given.kernel(routine, "topk"), given.kernel(routine, "group")
    count, chosen = int(choose.constants["EXPERTS"]), int(choose.constants["CHOSEN"])
    logits = product(h, given.router(routine, router.inputs[1]), torch.float32)
    rows = h.shape[0]
    ids, places = torch.empty((2, rows, chosen), dtype=torch.int32, device=h.device)
    weights = torch.empty((rows, chosen), dtype=torch.float32, device=h.device)
    counts = torch.zeros(count, dtype=torch.int32, device=h.device)
    given.launch(choose, (rows, 1, 1), parts=logits, ids=ids, weights=weights, places=places, counts=counts)
    pairs = rows * chosen
    table = pairs // int(group.constants["ROWS"]) + min(count, pairs)
    order, tiles = ids.new_empty(pairs), ids.new_empty((table, 3))
    grid = (max(cdiv(pairs, group.constants["BLOCK"]), cdiv(table, group.constants["TILES"])), 1, 1)
    given.launch(group, grid, counts=counts, ids=ids, places=places, order=order, tiles=tiles, pairs=pairs, table=table)
    return ids, weights, order, tiles


def _grouped(
    given: Given, routine: Routine, purpose: str, op: Op, x: Tensor, y: Tensor, order: Tensor, tiles: Tensor
) -> None:
    kernel = given.kernel(routine, purpose)
    if "codes_ptr" in (p.name for p in kernel.params):
        packed = given.packed(op.inputs[2])
        arguments = {"codes": packed.codes, "scales": packed.scales, "scale": packed.scale}
    else:
        weight, scale = given.weight(routine, op.inputs[2])
        arguments = {"weight": weight} | ({} if scale is None else {"scale": scale})
    columns = int(kernel.constants["COLUMNS"]) * int(kernel.constants.get("BLOCKS", 1))
    grid = (cdiv(int(kernel.constants["N"]), columns), tiles.shape[0], 1)
    given.launch(kernel, grid, x=x, **arguments, y=y, order=order, tiles=tiles)


def cdiv(a: int, b: int | float | bool) -> int:
    """a / b, rounded up."""
    return -(-a // int(b))


#: Kind of routine -> its function, where it is the same for a prompt's chunk and for rows of many sequences.
OF_ANY_ROWS: Mapping[str, Callable[[Given, Routine, Rows, Values], None]] = {
    "embed": embed,
    "norm": norm,
    "linear": linear,
    "silu": silu,
    "experts": experts,
}
#: Kind of routine -> its function for a chunk.
ROUTINES: Mapping[str, Callable[[Given, Routine, Chunk, Values], None]] = {
    **OF_ANY_ROWS,
    "heads": heads,
    "attention": attention,
}
