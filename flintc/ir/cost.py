"""What a launch costs: programs, bytes through device memory, arithmetic, and work done more often than needed.

Bytes are those that must pass between memory and the chip, each value once a launch. Re-reads by several programs of
one launch are taken to hit the L2 cache. A value that stays in its program costs nothing; one that waits for the last
program of a group is written and read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from flintc.ir.crossings import SPREADS
from flintc.ir.graph import Crossing, Graph, Launch, Op
from flintc.ir.ops import OPS
from flintc.ir.types import SYMBOLS, Dim, resolve

#: Values of the symbols of :mod:`flintc.ir.types`, and ``context``: tokens each row attends to, itself included.
Env = Mapping[str, int]

#: Output rows per program of a GEMV whose launch does not say.
DEFAULT_TILE = 16

#: Kinds of crossing whose value passes through device memory.
_THROUGH_MEMORY = ("last-arriver", "grid-barrier")

#: Arithmetic per element of an op's first output, for the ops that are no matrix product.
_FLOPS_PER_ELEMENT = {"add": 1, "norm": 5, "head_norm": 5, "rope": 3, "topk": 4, "silu_mul": 5, "sum": 1}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one launch, or the sum of several.

    programs: of the grid, as far as the graph decides. bytes_read, bytes_written: through device memory. flops:
    arithmetic the graph asks for; executed: the same with recomputed ops as often as they are evaluated.
    """

    programs: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    executed: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def redundancy(self) -> float:
        """Arithmetic done / arithmetic needed; 1.0 where nothing is evaluated twice."""
        return self.executed / self.flops if self.flops else 1.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.programs + other.programs,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.flops + other.flops,
            self.executed + other.executed,
        )


def decode_env(graph: Graph, context: int, batch: int = 1) -> dict[str, int]:
    """Symbols for a step of ``batch`` rows, each of its own sequence with ``context`` tokens, the new one included."""
    page = 1
    for op in graph.ops.values():
        if op.kind == "kv_write":
            page = max(page, _whole(graph.values[op.outputs[0]].type.shape[3]))
    pages = -(-context // page)
    sizes = {"B": batch, "P": pages * batch, "Q": batch, "T": pages, "C": context}
    assert set(sizes) == set(SYMBOLS)
    return {**sizes, "context": context}


def graph_cost(graph: Graph, env: Env, launches: Iterable[Launch] | None = None) -> Cost:
    """Sum over ``launches`` (all of the graph's)."""
    chosen = graph.launches if launches is None else launches
    return sum((launch_cost(graph, launch, env) for launch in chosen), Cost())


def launch_cost(graph: Graph, launch: Launch, env: Env) -> Cost:
    """Cost of one launch under ``env``; KeyError names a symbol it lacks."""
    flops = {o: op_flops(graph, graph.ops[o], env) for o in launch.ops}
    return Cost(
        programs(graph, launch, env),
        _bytes_read(graph, launch, env),
        _bytes_written(graph, launch, env),
        sum(flops.values()),
        sum(f * evaluations(graph, launch, o) for o, f in flops.items()),
    )


def programs(graph: Graph, launch: Launch, env: Env) -> int:
    """Programs that the launch needs by its tiles; a kernel may take more to split its rows or its batch further.

    Matrix products whose results meet inside the launch share programs, others have their own. The ops around them
    run in the same programs.
    """
    if len(launch.ops) == 1:
        return _op_programs(graph, graph.ops[launch.ops[0]], launch.tile or DEFAULT_TILE, env)
    import networkx as nx

    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(launch.ops)
    links.add_edges_from(pair for pair in graph.op_graph.subgraph(launch.ops).edges)
    total = 0
    for part in nx.connected_components(links):
        combined = any(graph.ops[o].kind == "combine" for o in part)
        anchors = [o for o in part if graph.ops[o].kind in SPREADS] or list(part)
        counts = [_op_programs(graph, graph.ops[o], launch.tile or DEFAULT_TILE, env) for o in anchors]
        ranks = [_ranks(graph.ops[o], graph, env) if combined else 1 for o in anchors]
        total += max(n // r for n, r in zip(counts, ranks, strict=True))
    return total


def _ranks(op: Op, graph: Graph, env: Env) -> int:
    """Experts of a row that one program adds up where the products are combined in it."""
    return resolve(graph.values[op.outputs[0]].type.shape[1], env) if op.kind == "expert_linear" else 1


def evaluations(graph: Graph, launch: Launch, op: str) -> int:
    """How often ``launch`` evaluates ``op`` for each time it is needed: once, or once per program that shares it."""
    crossings = {c.value: c for c in launch.crossings}
    return _evaluations(graph, launch, op, crossings)


def _evaluations(graph: Graph, launch: Launch, op: str, crossings: Mapping[str, Crossing]) -> int:
    counts = [1]
    for value in graph.ops[op].outputs:
        crossing = crossings.get(value)
        readers = [c for c in graph.consumers[value] if c in launch.ops]
        if crossing is not None and crossing.kind == "recompute":
            counts += [_sharers(graph, graph.ops[c], launch) for c in readers]
        elif crossing is not None and crossing.kind == "local":
            counts += [_evaluations(graph, launch, c, crossings) for c in readers]
    return max(counts)


def _sharers(graph: Graph, op: Op, launch: Launch) -> int:
    """Programs that need the same row of an input of ``op``."""
    one_row = {**dict.fromkeys(SYMBOLS, 1), "context": 1}
    return _op_programs(graph, op, launch.tile or DEFAULT_TILE, one_row)


def op_flops(graph: Graph, op: Op, env: Env) -> int:
    """Arithmetic of ``op``, a multiply-add counted as two; attention as the tokens a row may see."""
    out = graph.values[op.outputs[0]].type
    if op.kind in ("linear", "router", "expert_linear"):
        columns = graph.values[op.inputs[-1]].type.shape[-1]
        return 2 * out.size(env) * resolve(columns, env)
    if op.kind in ("attention", "attention_partial"):
        return 4 * graph.values[op.inputs[0]].type.size(env) * visible(op, env)
    if op.kind == "attention_merge":
        return _value_bytes(graph, op.inputs[0], env) // 2  # a multiply-add for each FP32 of the partials
    if op.kind == "combine":
        return 2 * graph.values[op.inputs[0]].type.size(env)
    return _FLOPS_PER_ELEMENT.get(op.kind, 0) * sum(graph.values[v].type.size(env) for v in op.outputs[:1])


def visible(op: Op, env: Env) -> int:
    """Tokens one row of an attention op reads: its context, or its window where that is shorter."""
    window = op.attrs["window"]
    return env["context"] if window is None else min(env["context"], _whole(window))


def _op_programs(graph: Graph, op: Op, tile: int, env: Env) -> int:
    """Programs that ``op`` runs in on its own."""
    out = graph.values[op.outputs[0]].type.shape
    if op.kind in ("linear", "router", "expert_linear"):
        rows = resolve(graph.values[op.inputs[-1]].type.shape[-2], env)
        batch = prod(resolve(d, env) for d in out[:2]) if op.kind == "expert_linear" else 1
        return batch * -(-rows // tile)
    if op.kind in ("attention", "attention_partial"):
        kv_heads = resolve(graph.values[op.inputs[1]].type.shape[2], env)
        return resolve(out[0], env) * kv_heads * (_live_splits(graph, op, env) if len(out) > 2 else 1)
    if op.kind == "attention_merge":
        return prod(resolve(d, env) for d in graph.values[op.inputs[0]].type.shape[:2])
    if op.kind == "kv_write":
        return resolve(graph.values[op.inputs[0]].type.shape[0], env)
    if op.kind in ("head_norm", "rope"):
        return prod(resolve(d, env) for d in out[:2])
    return resolve(out[0], env)


def _bytes_written(graph: Graph, launch: Launch, env: Env) -> int:
    through = {c.value for c in launch.crossings if c.kind in _THROUGH_MEMORY}
    written = dict.fromkeys([*graph.writes(launch), *through])
    return sum(_written(graph, graph.ops[graph.producers[v]], v, env) for v in written)


def _written(graph: Graph, op: Op, value: str, env: Env) -> int:
    if op.kind == "kv_write":
        return resolve(graph.values[op.inputs[0]].type.shape[0], env) * _token_bytes(graph, value)
    return _value_bytes(graph, value, env)


def _value_bytes(graph: Graph, value: str, env: Env) -> int:
    """Bytes of a value, of partials those that the context needs."""
    nbytes = graph.values[value].type.nbytes(env)
    op = graph.ops.get(graph.producers.get(value, ""))
    if op is None or op.kind != "attention_partial":
        return nbytes
    return nbytes * _live_splits(graph, op, env) // _whole(graph.values[op.outputs[1]].type.shape[2])


def _live_splits(graph: Graph, op: Op, env: Env) -> int:
    """Partials of a row that an attention over the whole context has in ``env``; under a window, all it may have."""
    count = _whole(graph.values[op.outputs[1]].type.shape[2])
    chunks = -(-env["context"] // _whole(op.attrs["chunk"]))
    return count if op.attrs["window"] is not None else min(count, chunks)


def _bytes_read(graph: Graph, launch: Launch, env: Env) -> int:
    """Every value from outside, and every inner one that passes through memory, at most once."""
    crossed = {c.value for c in launch.crossings}
    through = {c.value for c in launch.crossings if c.kind in _THROUGH_MEMORY}
    read: dict[str, int] = {}
    for o in launch.ops:
        op = graph.ops[o]
        ports = OPS[op.kind].inputs
        for port, value in zip(ports, op.inputs, strict=False):
            if value not in crossed or value in through:
                read[value] = read.get(value, 0) + _port_bytes(graph, op, port.removesuffix("?"), value, env)
    return sum(min(n, graph.values[v].type.nbytes(env)) for v, n in read.items())


def _port_bytes(graph: Graph, op: Op, port: str, value: str, env: Env) -> int:
    """Bytes that ``op`` reads at ``port``: less than the whole value where it picks rows, heads, experts or tokens."""
    part = _PARTS.get((op.kind, port))
    return part(graph, op, value, env) if part else _value_bytes(graph, value, env)


def _rows(graph: Graph, op: Op, value: str, env: Env) -> int:
    """One row of a table (embedding, RoPE) per row of the step."""
    type = graph.values[value].type
    rows = resolve(graph.values[op.outputs[0]].type.shape[0], env)
    return rows * type.nbytes(env) // max(1, resolve(type.shape[0], env))


def _experts(graph: Graph, op: Op, value: str, env: Env) -> int:
    """Each row's experts, and never more than there are."""
    type = graph.values[value].type
    experts = resolve(type.shape[0], env)
    chosen = prod(resolve(d, env) for d in graph.values[op.outputs[0]].type.shape[:2])
    return type.nbytes(env) // experts * min(chosen, experts)


def _heads(graph: Graph, op: Op, value: str, env: Env) -> int:
    """The heads that the op's attribute names."""
    type = graph.values[value].type
    span = op.attrs["v_heads" if op.kind == "kv_write" else "heads"]
    assert isinstance(span, tuple)
    return type.nbytes(env) * span[1] // resolve(type.shape[1], env)


def _visible_tokens(graph: Graph, op: Op, value: str, env: Env) -> int:
    rows = resolve(graph.values[op.inputs[0]].type.shape[0], env)
    return rows * visible(op, env) * _token_bytes(graph, value)


def _visible_pages(graph: Graph, op: Op, value: str, env: Env) -> int:
    """One table entry of 4 bytes for each page that holds a visible token."""
    rows = resolve(graph.values[op.inputs[0]].type.shape[0], env)
    page = _whole(graph.values[op.inputs[1]].type.shape[3])
    return 4 * rows * (visible(op, env) + page - 1) // page


def _one_entry(graph: Graph, op: Op, value: str, env: Env) -> int:
    """One table entry of 4 bytes per row of the step."""
    return 4 * resolve(graph.values[op.inputs[0]].type.shape[0], env)


def _nothing(graph: Graph, op: Op, value: str, env: Env) -> int:
    """The cache that ``kv_write`` adds to stays where it is."""
    return 0


_PARTS: dict[tuple[str, str], Callable[[Graph, Op, str, Env], int]] = {
    ("embed", "weight"): _rows,
    ("rope", "table"): _rows,
    ("expert_linear", "weight"): _experts,
    ("head_norm", "x"): _heads,
    ("kv_write", "v"): _heads,
    ("kv_write", "cache"): _nothing,
    ("kv_write", "block_table"): _one_entry,
    ("attention", "cache"): _visible_tokens,
    ("attention_partial", "cache"): _visible_tokens,
    ("attention", "block_table"): _visible_pages,
    ("attention_partial", "block_table"): _visible_pages,
}


def _token_bytes(graph: Graph, cache: str) -> int:
    """Bytes of one token's keys and values in ``cache`` [pages, 2, kv_heads, page, head_dim]."""
    type = graph.values[cache].type
    _, planes, heads, _, width = (_whole(d) if isinstance(d, int) else 1 for d in type.shape)
    return planes * heads * width * {"bf16": 2, "f32": 4}[type.dtype]


def _whole(value: Dim | object) -> int:
    assert isinstance(value, int)
    return value
