"""A bound model -> the unfused graph of one step: one launch per op, `attention` not yet lowered.

Names are as in docs/architecture.md: ``L12.h`` for a value of layer 12, ``L12.q.1`` where the name is bound again,
``L12.w.qkv`` and ``w.embed`` for weights. Every mistake in a block is a SpecError at its line of the spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from flintc.errors import Place, SpecError
from flintc.ir.entries import check_entries, operands, read_attributes
from flintc.ir.graph import Attr, Graph, Launch, Op, Value, ValueKind
from flintc.ir.ops import OpTypeError, infer
from flintc.ir.types import DType, TensorType
from flintc.spec import BoundModel, OpEntry
from flintc.spec.words import did_you_mean

Weights = Literal["bf16", "nvfp4"]

#: Rows of one sequence that a step may write to a windowed layer's ring before a row's window is lost.
RING_ROWS = 8

#: Values in one NVFP4 scale block: the columns of a packed weight are a multiple of it.
NVFP4_BLOCK = 16

#: Output rows per program of a GEMV: few enough for a grid that fills a GPU.
TILES = {"linear": 16, "expert_linear": 16, "router": 4}
#: A GEMV of this many rows has programs to spare and takes larger tiles.
WIDE_ROWS, WIDE_TILE = 1 << 16, 64

_STEP_INPUTS = ("ids", "positions", "seqs")


def build(model: BoundModel, weights: Weights = "bf16") -> Graph:
    """The graph of one step of ``model`` with its ``type: linear`` weights as ``weights``.

    Outputs are the spec's ``model.output`` and the last version of each layer's cache.
    """
    check_entries(model.spec)
    builder = _Builder(model, weights)
    builder.blocks(model.spec.model.before, None)
    for layer in range(model.layers):
        builder.layer(layer)
    builder.blocks(model.spec.model.after, None)
    body = frozenset(builder.ops)
    builder.blocks(model.spec.model.head, None)
    return builder.graph(frozenset(builder.ops) - body)


def ring_pages(window: int, page: int) -> int:
    """Pages of a windowed layer's ring: the window before a row, and the rows of its own step."""
    return -(-(window - 1 + RING_ROWS) // page)


def unfused(graph: Graph) -> Graph:
    """``graph`` with each op in a launch of its own, named after it."""
    ops = graph.ops.values()
    return graph.with_launches(
        tuple(Launch(x.name, x.kind, (x.name,), tile=default_tile(x, graph.values)) for x in ops)
    )


def default_tile(op: Op, values: Mapping[str, Value]) -> int | None:
    """Output rows per program of a GEMV; None for an op that is none."""
    if op.kind not in TILES:
        return None
    rows = values[op.inputs[-1]].type.shape[-2]
    return WIDE_TILE if isinstance(rows, int) and rows >= WIDE_ROWS else TILES[op.kind]


class _Builder:
    """Values and ops gathered so far, and which value each name stands for."""

    def __init__(self, model: BoundModel, weights: Weights) -> None:
        self.model = model
        self.weights = weights
        self.values: dict[str, Value] = {}
        self.ops: dict[str, Op] = {}
        self.names: dict[str, str] = {}
        #: Last cache version and window of each layer.
        self.caches: dict[int, tuple[str, int | None]] = {}
        for name in _STEP_INPUTS:
            self.names[name] = self.add(name, TensorType("i32", ("B",)), "input")

    def add(self, name: str, type: TensorType, kind: ValueKind, layer: int | None = None, source: str = "") -> str:
        self.values[name] = Value(name, type, kind, layer, source or None)
        return name

    def layer(self, layer: int) -> None:
        sets, layers = self.model.layer_sets, self.model.layers
        self.names.pop("cache", None)
        for use in self.model.spec.model.layer:
            if use.holds(layer, layers, sets):
                self.blocks((use.block,), layer)

    def blocks(self, names: tuple[str, ...], layer: int | None) -> None:
        for block in names:
            for i, entry in enumerate(self.model.spec.blocks[block]):
                if layer is None or entry.holds(layer, self.model.layers, self.model.layer_sets):
                    self.op(_Site(self.model, block, i, entry), layer)

    def op(self, site: _Site, layer: int | None) -> None:
        entry = site.entry
        reads = iter(enumerate(entry.reads))
        inputs: list[str] = []
        for port in operands(entry):
            inputs.append(self.operand(port, site, layer, inputs, reads))
        try:
            made = infer(entry.op, tuple(self.values[v].type for v in inputs), site.attrs)
        except OpTypeError as error:
            raise SpecError(f"{entry.op}: {error}", site.place()) from None
        self.record(site, layer, tuple(inputs), made)

    def operand(
        self, port: str, site: _Site, layer: int | None, before: list[str], reads: Iterator[tuple[int, str]]
    ) -> str:
        """The value at ``port``: given by the step, or what the entry reads next; ``before`` precede it."""
        match port:
            case "weight" | "sinks":
                return self.weight(site, layer)
            case "positions" | "seqs":
                return port
            case "block_table":
                return self.block_table(site)
            case "table":
                return self.rope_table(before[0])
            case "cache":
                self.open_cache(site, layer, before)
        at, name = next(reads)
        return self.lookup(name, site.place("in", at))

    def record(self, site: _Site, layer: int | None, inputs: tuple[str, ...], made: tuple[TensorType, ...]) -> None:
        """Add the op and bind what it makes."""
        entry = site.entry
        label = entry.name or entry.op
        name = _scoped(label, layer)
        if name in self.ops:
            raise SpecError(f"a second op named {label!r} in one layer", site.place(), remedy="give one a `name:`")
        kind: ValueKind = "cache" if entry.op == "kv_write" else "activation"
        outputs = tuple(self.bind(n, t, kind, layer) for n, t in zip(entry.binds, made, strict=True))
        self.ops[name] = Op(name, entry.op, inputs, outputs, site.attrs, layer)
        if kind == "cache" and layer is not None:
            self.caches[layer] = (outputs[0], self.caches[layer][1])

    def bind(self, name: str, type: TensorType, kind: ValueKind, layer: int | None) -> str:
        base = _scoped(name, layer)
        value, version = base, 0
        while value in self.values:
            version += 1
            value = f"{base}.{version}"
        self.names[name] = self.add(value, type, kind, layer)
        return value

    def lookup(self, name: str, place: Place) -> str:
        if name not in self.names:
            raise SpecError(f"undefined value {name!r}", place, remedy=did_you_mean(name, self.names))
        return self.names[name]

    def weight(self, site: _Site, layer: int | None) -> str:
        key = site.entry.weight
        assert key is not None
        spec = self.model.spec.weights[key]
        if spec.per_layer and layer is None:
            raise SpecError(f"weight {key!r} belongs to a layer, this block does not", site.place("weight"))
        scope = layer if spec.per_layer else None
        name = _scoped(f"w.{key}", scope)
        if name not in self.values:
            shape = site.weight_sizes("shape", spec.shape)
            if spec.rows and sum(site.weight_sizes("rows", spec.rows)) != shape[-2]:
                raise SpecError(f"`rows` of weight {key!r} do not add up to {shape[-2]}", site.weight_place("rows"))
            dtype: DType = self.weights if spec.type == "linear" else spec.type
            if dtype == "nvfp4" and shape[-1] % NVFP4_BLOCK:
                message = f"{shape[-1]} columns are not a multiple of {NVFP4_BLOCK}, as NVFP4 needs"
                raise SpecError(message, site.weight_place("shape", len(shape) - 1))
            self.add(name, TensorType(dtype, shape), "weight", scope, key)
        return name

    def block_table(self, site: _Site) -> str:
        window = site.window()
        if window is None:
            return self.add("block_table", TensorType("i32", ("Q", "T")), "input")
        pages = ring_pages(window, self.model.spec.numerics.kv_page)
        return self.add(f"block_table.w{window}", TensorType("i32", ("Q", pages)), "input")

    def rope_table(self, q: str) -> str:
        if "rope_table" in self.values:  # one for all layers: another head size does not fit it
            return "rope_table"
        head = self.values[q].type.shape[-1]
        half = head // 2 if isinstance(head, int) else 1
        return self.add("rope_table", TensorType("f32", ("C", 2, half)), "table")

    def open_cache(self, site: _Site, layer: int | None, before: list[str]) -> None:
        """The layer's first cache version, shaped by the keys that are first written to it."""
        ring = site.window()
        if layer is None:
            raise SpecError("a cache belongs to a layer, this block does not", site.place())
        if layer in self.caches:
            known = self.caches[layer][1]
            if known != ring:
                raise SpecError(f"window {ring} differs from {known}, as this layer's cache was written", site.place())
            return
        keys = self.values[before[0]].type
        if site.entry.op != "kv_write":
            raise SpecError("the cache is read before kv_write wrote it", site.place())
        if len(keys.shape) != 3:
            raise SpecError(f"kv_write: k is {keys}, expected 3 dimensions", site.place())
        page = self.model.spec.numerics.kv_page
        pages = "P" if ring is None else f"{ring_pages(ring, page)}*Q"
        name = _scoped("cache", layer)
        self.add(name, TensorType("bf16", (pages, 2, keys.shape[1], page, keys.shape[2])), "cache", layer)
        self.names["cache"], self.caches[layer] = name, (name, ring)

    def graph(self, head: frozenset[str]) -> Graph:
        spec = self.model.spec
        output = self.lookup(spec.model.output, spec.place("model", "output"))
        outputs = (output, *(cache for cache, _ in self.caches.values()))
        return unfused(Graph(spec.name, self.values, self.ops, (), outputs, head))


def _scoped(name: str, layer: int | None) -> str:
    return name if layer is None else f"L{layer}.{name}"


class _Site:
    """One entry of a block: what it says, and where."""

    def __init__(self, model: BoundModel, block: str, index: int, entry: OpEntry) -> None:
        self.model, self.block, self.index, self.entry = model, block, index, entry
        self.attrs: Mapping[str, Attr] = read_attributes(model, entry, ("blocks", block, index))

    def place(self, *path: str | int) -> Place:
        return self.model.spec.place("blocks", self.block, self.index, *path)

    def window(self) -> int | None:
        """The entry's window, checked before anything is sized by it."""
        window = self.attrs["window"]
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window <= 0):
            raise SpecError(f"window must be a positive whole number, not {window!r}", self.place("window"))
        return window

    def weight_sizes(self, key: str, dims: tuple[int | float | str, ...]) -> tuple[int, ...]:
        return tuple(self.model.dim(d, self.weight_place(key, i)) for i, d in enumerate(dims))

    def weight_place(self, *path: str | int) -> Place:
        assert self.entry.weight is not None
        return self.model.spec.place("weights", self.entry.weight, *path)
