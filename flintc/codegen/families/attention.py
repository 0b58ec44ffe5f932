"""Attention over the paged cache: split-KV partials, their merge, and both in one launch."""

from __future__ import annotations

from flintc.codegen.selection import MAX_ROWS, Selection, Selector, Signature, columns, ops_of, power_of_two
from flintc.errors import VerificationError
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.ops import splits
from flintc.ir.types import Dim

#: Partials merged together where the last program to arrive merges them. Part of the numerics: it sets their order.
SEGMENT = 16

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

#: The same of one that takes a run of tiles, in steps of one row and of several. At 128 channels a head two programs of
#: one row fit a multiprocessor, since three would share it unevenly; of several, where programs are many, three.
RUN_REGISTERS, SEVERAL_RUN_REGISTERS = 200, 168

#: Channels of a head that registers hold.
STRIP_HEADS = (64, 128)

#: Channels of a head that one program merges where that is a launch of its own: a program is a warp, and more of them
#: have more loads on their way.
MERGE_CHANNELS = 32

#: Programs that share a window: no more than this take its chunks.
WINDOW_PROGRAMS = 66

Constants = dict[str, int | float | bool]
Blocks = dict[str, str | bool]


def attention(graph: Graph, launch: Launch, partials: int | None = None) -> Selection:
    """``attention_partial`` alone, or with its ``attention_merge`` in one launch (the role ``attention``).

    partials: the most of a row and head over the whole context, in place of the op's own.
    """
    found, merges = ops_of(graph, launch, "attention_partial"), ops_of(graph, launch, "attention_merge")
    if not found:
        raise VerificationError(f"launch {launch.name}: attention has no kernel before it is lowered to partials")
    (op,) = found
    sig = Signature(graph, launch)
    for name, value in zip(("q", "cache", "positions", "seqs", "block_table"), op.inputs, strict=True):
        sig.value(name, value)
    for name, value in zip(("o", "m", "l"), op.outputs, strict=True):
        sig.value(name, value)
    sinks = any(_sink_and_output(sig, merge) for merge in merges)
    table, cache = graph.values[op.inputs[4]], op.inputs[1]
    constants = _tiling(graph, op)
    blocks: Blocks = {
        "columns": sig.extent("columns", table.type.shape[1], constants),
        "prefetch": launch.dependent is not None and cache in launch.dependent.prefetch,
        "sinks": sinks,
        "merge": bool(merges),
    }
    if merges:
        sig.counters("rows", f"{constants['KV_HEADS']}*B")
    if _window(op) is None:
        return _runs(sig, _name(launch, op), constants, blocks, partials or _count(op))
    return _chunks(sig, _name(launch, op), op, constants, blocks)


def _runs(sig: Signature, name: str, constants: Constants, blocks: Blocks, partials: int) -> Selection:
    """A partial for each program, of a run of its row's chunks; merge: the last program merges those of a row.

    In registers and of one row, a tile's values are loaded a tile ahead, as its keys always are (``ahead``).
    """
    strips = _in_registers(constants)
    constants |= _rows(strips, blocks)
    constants["PROGRAMS"] = partials
    if blocks["merge"]:
        constants["SEGMENT"] = min(SEGMENT, partials)
    return sig.select(
        name,
        "attention_runs.py.j2",
        "Attention of one row's query group over a run of its positions"
        + ("; the last program merges." if blocks["merge"] else "."),
        grid=_grid(constants),
        constants=constants,
        blocks=blocks | {"segmented": partials > SEGMENT, "strips": strips, "ahead": False},
        num_warps=int(constants["WARPS"]),
        num_stages=1 if strips else RUN_STAGES,
        max_registers=RUN_REGISTERS if strips else 0,
        several_registers=SEVERAL_RUN_REGISTERS if strips else None,
        one_row={"ahead": strips},
    )


def _chunks(sig: Signature, name: str, op: Op, constants: Constants, blocks: Blocks) -> Selection:
    """A partial for each chunk of a window; merge: the last program merges those of a row."""
    count, chunk = _count(op), _chunk(op)
    constants |= {"PROGRAMS": min(count, WINDOW_PROGRAMS), "WINDOW": _window(op) or 0, "SPLITS": count}
    if blocks["merge"]:
        constants["SEGMENT"] = min(SEGMENT, count)
    # A chunk of one step has no next one, and lies in shared memory once, or in none.
    stages = 1 if int(constants["TILE"]) >= chunk else STAGES
    strips = count == constants["PROGRAMS"] and chunk == constants["TILE"] and _in_registers(constants)
    constants |= _rows(strips, blocks)
    return sig.select(
        name,
        "attention.py.j2",
        "Attention of one row's query group over a run of chunks of its positions"
        + ("; the last program merges." if blocks["merge"] else "."),
        grid=_grid(constants),
        constants=constants,
        blocks=blocks | {"segmented": count > SEGMENT, "strips": strips},
        num_warps=int(constants["WARPS"]),
        num_stages=stages,
        max_registers=STRIP_REGISTERS if strips else 0,
        apart=bool(blocks["merge"]),
    )


def _rows(strips: bool, blocks: Blocks) -> Constants:
    """What tells which positions earlier steps wrote, where these are loaded ahead of the wait."""
    return {"ROWS": MAX_ROWS} if strips and blocks["prefetch"] else {}


def _in_registers(constants: Constants) -> bool:
    """Whether a tile lies within a page and a chunk, and registers hold it and the heads that attend to it.

    See :mod:`flintc.codegen.device.strips`.
    """
    tile, chunk, page, head, group = (int(constants[name]) for name in ("TILE", "CHUNK", "PAGE", "HEAD", "GROUP"))
    return page % tile == 0 and chunk % tile == 0 and head in STRIP_HEADS and group <= MIN_COLUMNS


def _grid(constants: Constants) -> tuple[Dim, Dim, Dim]:
    """Rows, KV heads, and the programs that share one of each."""
    return "B", int(constants["KV_HEADS"]), int(constants["PROGRAMS"])


def attention_merge(graph: Graph, launch: Launch) -> Selection:
    """``attention_merge`` alone: programs of one warp, each for some channels of one row and head."""
    (op,) = ops_of(graph, launch, "attention_merge")
    sig = Signature(graph, launch)
    for name, value in zip(("o", "m", "l", "positions", "seqs"), op.inputs[:5], strict=True):
        sig.value(name, value)
    sinks = _sink_and_output(sig, op)
    window = _window(op)
    heads, head = graph.values[op.inputs[0]].type.shape[1], columns(graph, op.inputs[0])
    assert isinstance(heads, int)
    part = min(MERGE_CHANNELS, power_of_two(head))
    constants: Constants = {"HEADS": heads, "HEAD": head, "PART": part, "CHUNK": _chunk(op), "SPLITS": _count(op)}
    if window is not None:
        constants["WINDOW"] = window
    return sig.select(
        _name(launch, op),
        "attention_merge.py.j2",
        "Merge of one head's partials of one row.",
        grid=("B", heads, -(-head // part)),
        constants=constants,
        blocks={"windowed": window is not None, "sinks": sinks},
        num_warps=1,
    )


def _tiling(graph: Graph, op: Op) -> Constants:
    """Sizes of the heads, of the cache and of a program's work."""
    chunk, scale = _chunk(op), op.attrs["scale"]
    _, heads, head = graph.values[op.inputs[0]].type.shape
    _, _, kv_heads, page, _ = graph.values[op.inputs[1]].type.shape
    assert isinstance(heads, int) and isinstance(head, int) and isinstance(kv_heads, int) and isinstance(page, int)
    assert isinstance(scale, int | float)
    warps = min(WARPS, power_of_two(-(-chunk // STRIP)))
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "QUERIES": max(MIN_COLUMNS, power_of_two(heads // kv_heads)),
        "HEAD": head,
        "PAGE": page,
        "CHUNK": chunk,
        "WARPS": warps,
        "STRIP": STRIP,
        "TILE": warps * STRIP,
        "SCALE": float(scale),
    }


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


def _count(op: Op) -> int:
    partials = op.attrs["partials"]
    assert partials is None or isinstance(partials, int)
    return splits(_window(op), _chunk(op), partials)


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
