"""Attention over the paged cache: split-KV partials, their merge, and both in one launch."""

from __future__ import annotations

from flintc.codegen.selection import Selection, Selector, Signature, columns, ops_of, power_of_two
from flintc.errors import VerificationError
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.ops import RUNS, splits
from flintc.ir.types import Dim

#: Programs per row and KV head over the whole context: with four KV heads, two on each of 132 multiprocessors. In one
#: launch with the merge each makes one partial, so this number is part of its numerics.
PROGRAMS = RUNS

#: Partials merged together by the last program to arrive. Part of the numerics: it sets the order of the merge.
SEGMENT = 16

#: Programs of a launch that may wait for others of it: fewer than there are places for programs on the smallest target
#: (132 multiprocessors, one each at least), so that the others always find one.
WAITING = 96

#: Positions of a warp per step of a program's loop, and steps whose keys and values are in shared memory or on their
#: way there. The strip is part of the numerics: a warp's running maximum is over its own positions.
STRIP, STAGES = 16, 3

#: Such steps where programs take runs, through shared memory: so many that a multiprocessor's holds two programs, since
#: three would share it unevenly.
RUN_STAGES = 4

#: Warps of a program.
WARPS = 4

#: Fewest columns of a matrix operand: query groups are padded to it.
MIN_COLUMNS = 8

#: Registers of a program that attends in strips: left to itself the assembler saves so many that it spills.
STRIP_REGISTERS = 128

#: The same of one that takes a run of tiles: two of its programs fit a multiprocessor.
RUN_REGISTERS = 200

#: Channels of a head that registers hold.
STRIP_HEADS = (64, 128)

Constants = dict[str, int | float | bool]
Blocks = dict[str, str | bool]


def attention(graph: Graph, launch: Launch, programs: int = PROGRAMS) -> Selection:
    """``attention_partial`` alone, or with its ``attention_merge`` in one launch (the role ``attention``).

    programs: the most that share a row and KV head where only the device knows the number of partials.
    """
    partials, merges = ops_of(graph, launch, "attention_partial"), ops_of(graph, launch, "attention_merge")
    if not partials:
        raise VerificationError(f"launch {launch.name}: attention has no kernel before it is lowered to partials")
    (op,) = partials
    sig = Signature(graph, launch)
    for name, value in zip(("q", "cache", "positions", "seqs", "block_table"), op.inputs, strict=True):
        sig.value(name, value)
    for name, value in zip(("o", "m", "l"), op.outputs, strict=True):
        sig.value(name, value)
    sinks = any(_sink_and_output(sig, merge) for merge in merges)
    table, cache = graph.values[op.inputs[4]], op.inputs[1]
    constants = _tiling(graph, op, programs)
    blocks: Blocks = {
        "columns": sig.extent("columns", table.type.shape[1], constants),
        "splits": sig.extent("splits", _count(op), constants),
        "prefetch": launch.dependent is not None and cache in launch.dependent.prefetch,
        "sinks": sinks,
    }
    if merges:
        constants["SEGMENT"] = _members(op)
        sig.counters("rows", f"{constants['KV_HEADS']}*B")
    name = _name(launch, op)
    if merges and _window(op) is None:
        return _runs(sig, name, constants, blocks, many=programs > SEGMENT)
    return _chunks(sig, name, op, constants, blocks, merge=bool(merges))


def _runs(sig: Signature, name: str, constants: Constants, blocks: Blocks, *, many: bool) -> Selection:
    """A partial for each program, of a run of its row's positions. many: a row may have more than one merges."""
    shortest = -(-int(constants.pop("CHUNK")) // int(constants["TILE"]))
    strips = _in_registers(constants)
    constants |= {"MIN_RUN": shortest} | ({"WAITING": WAITING} if many else {})
    last = "the last programs merge" if many else "the last program merges"
    return sig.select(
        name,
        "attention_runs.py.j2",
        f"Attention of one row's query group over a run of its positions; {last}.",
        grid=_grid(constants),
        constants=constants,
        blocks=blocks | {"many": many, "strips": strips},
        num_warps=int(constants["WARPS"]),
        num_stages=1 if strips else RUN_STAGES,
        max_registers=RUN_REGISTERS if strips else 0,
    )


def _chunks(sig: Signature, name: str, op: Op, constants: Constants, blocks: Blocks, *, merge: bool) -> Selection:
    """A partial for each chunk; merge: the last program merges those of a row."""
    window = _window(op) is not None
    # A window's chunk of one step has no next one, and lies in shared memory once, or in none.
    stages = 1 if window and int(constants["TILE"]) >= _chunk(op) else STAGES
    one_each = _count(op) == constants["PROGRAMS"] and _chunk(op) == constants["TILE"]
    strips = window and one_each and _in_registers(constants)
    return sig.select(
        name,
        "attention.py.j2",
        "Attention of one row's query group over a run of chunks of its positions"
        + ("; the last program merges." if merge else "."),
        grid=_grid(constants),
        constants=constants,
        blocks=blocks | {"windowed": window, "merge": merge, "segmented": _segmented(op), "strips": strips},
        num_warps=int(constants["WARPS"]),
        num_stages=stages,
        max_registers=STRIP_REGISTERS if strips else 0,
        apart=window and merge,
    )


def _in_registers(constants: Constants) -> bool:
    """Whether a tile lies within a page, and registers hold it and the heads that attend to it: device/strips.py."""
    tile, page, head, group = (int(constants[name]) for name in ("TILE", "PAGE", "HEAD", "GROUP"))
    return page % tile == 0 and head in STRIP_HEADS and group <= MIN_COLUMNS


def _grid(constants: Constants) -> tuple[Dim, Dim, Dim]:
    """Rows, KV heads, and the programs that share one of each."""
    return "B", int(constants["KV_HEADS"]), int(constants["PROGRAMS"])


def attention_merge(graph: Graph, launch: Launch) -> Selection:
    """``attention_merge`` alone: one program per row and head."""
    (op,) = ops_of(graph, launch, "attention_merge")
    sig = Signature(graph, launch)
    for name, value in zip(("o", "m", "l", "positions", "seqs"), op.inputs[:5], strict=True):
        sig.value(name, value)
    sinks = _sink_and_output(sig, op)
    window = _window(op)
    heads = graph.values[op.inputs[0]].type.shape[1]
    assert isinstance(heads, int)
    constants: Constants = {"HEADS": heads, "HEAD": columns(graph, op.inputs[0]), "CHUNK": _chunk(op)}
    constants["SEGMENT"] = _members(op)
    if window is not None:
        constants["WINDOW"] = window
    blocks: dict[str, str | bool] = {
        "splits": sig.extent("splits", _count(op), constants),
        "windowed": window is not None,
        "sinks": sinks,
    }
    return sig.select(
        _name(launch, op),
        "attention_merge.py.j2",
        "Merge of one head's partials of one row.",
        grid=("B", heads, 1),
        constants=constants,
        blocks=blocks,
        num_warps=1,
    )


def _tiling(graph: Graph, op: Op, programs: int) -> Constants:
    """Sizes of the heads, of the cache and of a program's work."""
    window, chunk, count, scale = _window(op), _chunk(op), _count(op), op.attrs["scale"]
    _, heads, head = graph.values[op.inputs[0]].type.shape
    _, _, kv_heads, page, _ = graph.values[op.inputs[1]].type.shape
    assert isinstance(heads, int) and isinstance(head, int) and isinstance(kv_heads, int) and isinstance(page, int)
    assert isinstance(scale, int | float)
    warps = min(WARPS, power_of_two(-(-chunk // STRIP)))
    constants: Constants = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "QUERIES": max(MIN_COLUMNS, power_of_two(heads // kv_heads)),
        "HEAD": head,
        "PAGE": page,
        "CHUNK": chunk,
        "WARPS": warps,
        "STRIP": STRIP,
        "TILE": warps * STRIP,
        "PROGRAMS": min(count, programs) if isinstance(count, int) else programs,
        "SCALE": float(scale),
    }
    if window is not None:
        constants["WINDOW"] = window
    return constants


def _members(op: Op) -> int:
    """Most partials of one segment."""
    count = _count(op)
    return min(SEGMENT, count) if isinstance(count, int) else SEGMENT


def _segmented(op: Op) -> bool:
    """Whether a row may have more partials than one segment holds."""
    count = _count(op)
    return isinstance(count, str) or count > SEGMENT


def _sink_and_output(sig: Signature, merge: Op) -> bool:
    """Pass the sinks, where there are any, and the output; returns whether there are sinks."""
    sinks = merge.inputs[5:]
    for value in sinks:
        sig.value("sinks", value)
    sig.value("y", merge.outputs[0])
    return bool(sinks)


def _name(launch: Launch, op: Op) -> str:
    window = _window(op)
    return f"{launch.role}_full" if window is None else f"{launch.role}_window{window}"


def _count(op: Op) -> Dim:
    return splits(_window(op), _chunk(op))


def _window(op: Op) -> int | None:
    window = op.attrs["window"]
    assert window is None or isinstance(window, int)
    return window


def _chunk(op: Op) -> int:
    chunk = op.attrs["chunk"]
    assert isinstance(chunk, int)
    return chunk


SELECTORS: dict[str, Selector] = {
    "attention_partial": attention,
    "attention_merge": attention_merge,
    "attention": attention,
}
