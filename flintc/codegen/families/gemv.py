"""Dense matrix-vector products on tensor cores: plain, with the gated activation, with the heads' epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flintc.codegen.families.heads import finished_blocks, finished_heads, finished_suffix, heads_of
from flintc.codegen.schedule import schedule_of
from flintc.codegen.selection import Selection, Selector, Signature, only_op
from flintc.errors import UsageError, VerificationError
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.packed import BLOCK_ROWS, in_blocks

Constants = dict[str, int | float | bool]

#: Warps of a program at most; they share K.
MAX_WARPS = 8

#: Warps of a program at least, where K has steps for them.
FEW_WARPS = 4

#: SMs of the smallest GPU that a launch is laid out for.
SMS = 132

#: Registers per thread: stated, they make the compiler load all of x at once after the wait, not where a part is used.
#: The small budget lets twice as many programs share an SM, the large one keeps more of each one's loads in flight.
SMALL_BUDGET, LARGE_BUDGET = 128, 168

#: Registers of an SM.
SM_REGISTERS = 65536

#: Vectors that an instruction multiplies.
INSTRUCTION_COLUMNS = 8

#: Output rows of a program where the launch does not say.
TILE = 16


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored, and what a program makes of it.

    step: columns of K in a step. units: pairs of instructions in a step. loads: 16-byte loads by which one thread holds
    a tile of weights; packed ones unpack to four times their registers.
    """

    step: int
    units: int
    loads: int


BF16, NVFP4 = Format(step=32, units=1, loads=16), Format(step=128, units=4, loads=8)


@dataclass(frozen=True, slots=True)
class Walk:
    """How the warps of a program walk K: ``steps`` steps of each at a time, added up in ``chains`` sums."""

    format: Format
    warps: int
    chains: int
    steps: int

    @property
    def cuts(self) -> bool:
        """Whether a lone vector may be cut into slices, one for each sum."""
        return self.chains > 1

    @property
    def block(self) -> int:
        """Columns of K in one tile."""
        return self.warps * self.steps * self.format.step

    def constants(self, rows: int, k: int, tile: int) -> Constants:
        """What a product of weights [rows, k] is bound to; EVEN says that no part of it needs masks."""
        return {
            "N": rows, "K": k, "TILE": tile, "SPLIT": self.warps, "CHAINS": self.chains, "STEPS": self.steps,
            "EVEN": rows % tile == 0 and k % self.block == 0, **blocked(self.format, rows, k),
        }  # fmt: skip


def blocked(format: Format, rows: int, k: int, of: str = "") -> Constants:
    """The constant of a packed weight [rows, k] that tells how it lies; ``of``: which of a launch's two."""
    return {f"{of}BLOCKED": in_blocks(rows, k)} if format is NVFP4 else {}


def lay_out(name: str, tile: int, k: int, format: Format, programs: int) -> tuple[Walk, int]:
    """The walk of the kernel called ``name`` and its register budget: as its schedule says, or by the rules."""
    shape = walk(tile, k, format, schedule_of(name).warps)
    return shape, registers_of(name, tile, programs, shape.warps)


def registers_of(name: str, tile: int, programs: int, warps: int) -> int:
    """Register budget of the kernel called ``name``: as its schedule says, or by the rule."""
    told = schedule_of(name).registers
    return max_registers(tile, programs, warps) if told is None else told


def walk(tile: int, k: int, format: Format = BF16, wanted: int | None = None) -> Walk:
    """By ``wanted`` warps, else FEW_WARPS, or more where that many hold a small tile at once; fewer where K is short.

    Small programs pack well: all of a launch's fit the GPU at once, and beside those of the launch before.
    A tile of 16 rows is a row of instructions, each waiting for the one before: chains hide that.
    """
    held_by = _steps(k, format) // (format.loads * 8 // tile) if tile == 16 else FEW_WARPS
    warps = min(MAX_WARPS, wanted or max(FEW_WARPS, held_by), _steps(k, format))
    steps = steps_at_a_time(tile, k, warps, format)
    whole = k <= warps * steps * format.step
    return Walk(format, warps, chains_of(tile, steps, format, INSTRUCTION_COLUMNS if whole else 2), steps)


def chains_of(tile: int, steps: int, format: Format, most: int) -> int:
    """Sums of a warp: best as many as an instruction has columns, since a lone vector is cut among them.

    most: few where K is more than one tile, since the next one waits in registers too.
    """
    return min(most, steps * format.units) if tile == 16 else 1


def steps_at_a_time(tile: int, k: int, warps: int, format: Format) -> int:
    """Steps of a warp that fit its registers, fewer where they then divide K."""
    steps = max(1, min(_steps(k, format) // warps, format.loads * 8 // tile))
    while steps > 1 and k % (warps * steps * format.step):
        steps //= 2
    return steps


def _steps(k: int, format: Format) -> int:
    """Steps within K, a power of two."""
    return max(1, _floor_power(k) // format.step)


def _floor_power(n: int) -> int:
    """Largest power of two <= n."""
    return 1 << (n.bit_length() - 1)


def max_registers(tile: int, programs: int, warps: int) -> int:
    """Register budget of a program: the larger one where all programs still fit the GPU at once.

    Larger tiles have loads enough in flight however they are scheduled.
    """
    if tile > 16:
        return 0
    resident = SMS * (SM_REGISTERS // (LARGE_BUDGET * 32 * warps))
    return LARGE_BUDGET if programs <= resident else SMALL_BUDGET


def tile_of(launch: Launch) -> int:
    """Weight rows of one program: what the launch says, a multiple of the instruction's 16."""
    tile = launch.tile or TILE
    if tile % 16:
        raise VerificationError(f"launch {launch.name}: a tile of {tile} rows is not a multiple of 16")
    return tile


def matrix(graph: Graph, op: Op) -> tuple[int, int]:
    """(output rows, K) of an op's weight, of one expert where experts are stacked."""
    rows, k = graph.values[op.inputs[-1]].type.shape[-2:]
    assert isinstance(rows, int) and isinstance(k, int)
    return rows, k


def format_of(graph: Graph, op: Op) -> Format:
    """Format of an op's weight; UsageError for packed rows that end within a lane's 32 codes."""
    weight = graph.values[op.inputs[-1]]
    if weight.type.dtype != "nvfp4":
        return BF16
    if matrix(graph, op)[1] % 32:
        message = f"{weight.name} is {weight.type}: the rows that kernels unpack hold a multiple of 32 values"
        raise UsageError(message, remedy="compile with bf16 weights")
    return NVFP4


def weight_blocks(graph: Graph, launch: Launch, op: Op) -> dict[str, str | bool]:
    """Format of an op's weight, whether it may be read above the wait, and that it meets several vectors.

    A lone one is for ``one_row`` of a selection to say.
    """
    return {
        "nvfp4": format_of(graph, op) is NVFP4,
        "prefetch": launch.dependent is not None and op.inputs[-1] in launch.dependent.prefetch,
        "lone": False,
    }


def is_held(blocks: Mapping[str, str | bool], shape: Walk, constants: Constants) -> bool:
    """Whether weights are unpacked above the wait too: where one tile holds all of K."""
    whole = bool(constants["EVEN"]) and constants["K"] == shape.block
    return bool(blocks["nvfp4"]) and bool(blocks["prefetch"]) and whole


def kernel_name(graph: Graph, op: Op, what: str) -> str:
    """``what`` with the size of the op's weight, and its format unless BF16."""
    n, k = matrix(graph, op)
    return f"{what}_{n}x{k}" + ("_nvfp4" if format_of(graph, op) is NVFP4 else "")


def is_rounded(graph: Graph, op: Op) -> bool:
    """Whether the op's output is BF16: its sums are rounded before anything reads them."""
    return graph.values[op.outputs[0]].type.dtype == "bf16"


def linear(graph: Graph, launch: Launch) -> Selection:
    """``linear``: one product, in BF16 or FP32."""
    op = only_op(graph, launch, "linear")
    (n, k), tile, rounded = matrix(graph, op), tile_of(launch), is_rounded(graph, op)
    name = kernel_name(graph, op, "linear") + ("" if rounded else "_f32")
    shape, registers = lay_out(name, tile, k, format_of(graph, op), -(-n // tile))
    blocks, constants = weight_blocks(graph, launch, op), shape.constants(n, k, tile)
    sig = Signature(graph, launch)
    sig.value("x", op.inputs[0])
    sig.value("weight", op.inputs[1])
    sig.value("y", op.outputs[0])
    sig.symbol("B", "B")
    return sig.select(
        name,
        "gemv.py.j2",
        f"y [B, {n}] = x [B, {k}] times weight [{n}, {k}].",
        grid=(-(-n // tile), 1, 1),
        blocks={"epilogue": "store", "rounded": rounded, "held": is_held(blocks, shape, constants), **blocks},
        constants=constants,
        num_warps=shape.warps,
        max_registers=registers,
        one_row={"lone": shape.cuts},
    )


def gate_up(graph: Graph, launch: Launch) -> Selection:
    """``gate_up``: a product whose rows are gates, then ups; writes their activation."""
    op, silu = only_op(graph, launch, "linear"), only_op(graph, launch, "silu_mul")
    (n, k), tile, name = matrix(graph, op), tile_of(launch), kernel_name(graph, op, "gate_up")
    shape, registers = lay_out(name, tile, k, format_of(graph, op), -(-n // tile))
    sig = Signature(graph, launch)
    sig.value("x", op.inputs[0])
    sig.value("weight", op.inputs[1])
    sig.value("act", silu.outputs[0])
    sig.symbol("B", "B")
    return sig.select(
        name,
        "gemv.py.j2",
        f"act [B, {n // 2}] = silu(gate) * up, both rows of weight [{n}, {k}] times x [B, {k}].",
        grid=(-(-n // tile), 1, 1),
        blocks={
            "epilogue": "silu_mul", "rounded": is_rounded(graph, op), "held": False,
            **weight_blocks(graph, launch, op),
        },
        constants=shape.constants(n, k, tile),
        num_warps=shape.warps,
        max_registers=registers,
        one_row={"lone": shape.cuts},
    )  # fmt: skip


def qkv(graph: Graph, launch: Launch) -> Selection:
    """``qkv``: a product seen as heads; the last program of a head norms, rotates and stores it."""
    op = only_op(graph, launch, "linear")
    (n, k), tile = matrix(graph, op), tile_of(launch)
    name = kernel_name(graph, op, "qkv") + finished_suffix(graph, launch)
    heads, head = heads_of(graph, op.outputs[0])
    _need_whole_groups(graph, op, head)
    parts = -(-head // tile)
    shape, registers = lay_out(name, tile, k, format_of(graph, op), heads * parts)
    sig = Signature(graph, launch)
    sig.value("x", op.inputs[0])
    sig.value("weight", op.inputs[1])
    constants = shape.constants(n, k, tile)
    constants |= {"HEAD": head, "PARTS": parts, "EVEN": head % tile == 0 and k % shape.block == 0}
    finished_heads(graph, launch, op.outputs[0], sig, constants)
    blocks = weight_blocks(graph, launch, op) | finished_blocks(graph, launch, sig, constants)
    sig.counters("arrivals", heads)
    sig.symbol("B", "B")
    done = "normed, rotated" if blocks["rotate"] else "normed"
    return sig.select(
        name,
        "gemv.py.j2",
        f"qkv [B, {n}] = x [B, {k}] times weight; heads are {done} and stored.",
        grid=(heads * parts, 1, 1),
        blocks={"epilogue": "heads", "held": is_held(blocks, shape, constants), **blocks},
        constants=constants,
        num_warps=shape.warps,
        max_registers=registers,
        one_row={"lone": shape.cuts},
    )  # fmt: skip


def _need_whole_groups(graph: Graph, op: Op, head: int) -> None:
    """UsageError where a head of a weight in blocks begins within one."""
    if format_of(graph, op) is NVFP4 and in_blocks(*matrix(graph, op)) and head % BLOCK_ROWS:
        message = f"{op.name}: heads of {head} channels are no multiple of {BLOCK_ROWS}, as kernels for nvfp4 need"
        raise UsageError(message, remedy="compile with bf16 weights")


SELECTORS: dict[str, Selector] = {"linear": linear, "gate_up": gate_up, "qkv": qkv}
