"""Kernels of the general path: one method per kind of routine, from its ops to kernels by what they are for.

Parameters are passed by name, so a kernel states no more than it needs; tile sizes are constants that the runtime
reads to make its grids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flintc.codegen.families.attention import attention as step_attention
from flintc.codegen.render import render_kernel
from flintc.codegen.selection import KernelTable, Selection, power_of_two
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.packed import in_blocks
from flintc.ir.plan import Kernel, Param, ParamType

Constants = Mapping[str, int | float | bool]
Purposes = Mapping[str, str]

_BF16, _F32, _I32, _U8, _INT = "*bf16", "*fp32", "*i32", "*u8", "i32"

#: Schedules, measured on an H200: docs/prefill.md has the figures.
#: Rows of the matrix that an attention program holds (rows of the prompt times heads that share keys), keys a tile,
#: and warps: to the whole context, and to a window, where programs are short and so two of them share a processor.
ATTENTION = {False: (128, 64, 8), True: (64, 32, 4)}
#: Partials of a row and head of a wide step, which has rows enough to fill the GPU: few, since one program merges them.
STEP_PARTIALS = 16
#: Rows of one expert that a program multiplies.
EXPERT_ROWS = 128
#: Output columns, warps and stages of a program, by product and whether weights are packed.
EXPERT_TILES = {
    ("gate_up", False): (128, 8, 4), ("down", False): (128, 8, 3),
    ("gate_up", True): (64, 4, 3), ("down", True): (64, 4, 2),
}  # fmt: skip
#: Columns of K a step, where weights are not packed.
EXPERT_STEP = 64
#: Blocks of output columns that a program computes one after the other, where K is too short to fill it.
EXPERT_BLOCKS = 8
#: Columns that are permuted among themselves where packed weights meet the rows of a prompt.
WORD_COLUMNS = 128
#: BF16 parts that an FP32 router weight is the sum of, exactly.
ROUTER_PARTS = 3


@dataclass
class Kernels:
    """Kernels of the general path, made as routines ask for them."""

    graph: Graph
    table: KernelTable = field(default_factory=KernelTable)

    def embed(self, ops: Sequence[Op]) -> Purposes:
        """A copy of rows: torch's."""
        return {}

    def norm(self, ops: Sequence[Op]) -> Purposes:
        """RMSNorm, after the residual add and the sum over experts where the run has them."""
        kinds = [op.kind for op in ops]
        combine, shared, add = "combine" in kinds, "sum" in kinds, "add" in kinds
        params: dict[str, str] = {}
        constants: dict[str, int | float | bool] = {}
        if combine:
            params = {"experts": _BF16, "weights": _F32}
            constants["RANKS"] = self._dim(ops[0].inputs[0], 1)
        if shared:
            params["shared"] = _BF16
        if not combine:
            params["x"] = _BF16
        if add:
            params |= {"residual": _BF16, "residual_out": _BF16}
        params |= {"weight": _F32, "y": _BF16}
        width = self._dim(ops[-1].outputs[0], 1)
        constants |= {"WIDTH": width, "BLOCK": power_of_two(width), "EPS": _number(ops[-1], "eps")}
        ordered = self._ordered(ops[-1].outputs[0])
        words = ["combine"] * combine + ["shared"] * shared + ["add"] * add + ["norm"] + ["ordered"] * ordered
        name, doc = f"rows_{'_'.join(words)}_{width}", "A row's norm, and what comes before it."
        blocks = {"combine": combine, "shared": shared, "add": add, "ordered": ordered}
        return {"run": self._add(name, "rows_norm.py.j2", doc, params, constants, blocks)}

    def silu(self, ops: Sequence[Op]) -> Purposes:
        """silu(gate) * up."""
        width = self._dim(ops[0].outputs[0], -1)
        constants = {"WIDTH": width, "BLOCK": min(1024, power_of_two(width))}
        params = {"x": _BF16, "y": _BF16}
        doc = "silu(gate) * up of a row."
        return {"run": self._add(f"rows_silu_{width}", "rows_silu.py.j2", doc, params, constants)}

    def linear(self, ops: Sequence[Op]) -> Purposes:
        """A library's product; a packed weight is unpacked first."""
        return self._unpack(ops[0].inputs[1], self._ordered(ops[0].inputs[0]))

    def heads(self, ops: Sequence[Op]) -> Purposes:
        """Norms and rotation of queries and keys; keys and values stored: of a prompt's rows, and of a wide step's."""
        return {"run": self._heads(ops, False), "step": self._heads(ops, True)}

    def _heads(self, ops: Sequence[Op], apart: bool) -> str:
        """The kernel for rows that follow each other, or ``apart``: for rows of a sequence each."""
        q, k, write = ops[0], ops[1], ops[-1]
        rotated, windowed = len(ops) == 4, write.attrs["window"] is not None
        params = {"x": _BF16, "q_weight": _F32, "k_weight": _F32} | ({"table": _F32} if rotated else {})
        if apart:
            params |= {
                "positions": _I32,
                "seqs": _I32,
                "block_table": _I32,
                "q": _BF16,
                "cache": _BF16,
                "columns": _INT,
            }
        else:
            params |= {"block_table": _I32, "q": _BF16, "kv": _BF16, "cache": _BF16}
            params |= dict.fromkeys(("start", "offset", "keys", "oldest", "columns"), _INT)
        _, _, kv_heads, page, head = (self._dim(write.inputs[2], axis) if axis else 0 for axis in range(5))
        constants = {
            "HEADS": self._dim(q.outputs[0], 1), "KV_HEADS": kv_heads, "HEAD": head, "PAGE": page, "RING": windowed,
            "BLOCK": 8, "EPS": _number(q, "eps"),
        }  # fmt: skip
        assert q.attrs["eps"] == k.attrs["eps"]
        name = "rows_heads" + "_rope" * rotated + "_ring" * windowed + "_step" * apart
        doc = "A row's heads: norms, rotation, and keys and values stored."
        return self._add(name, "rows_heads.py.j2", doc, params, constants, {"rotated": rotated, "apart": apart})

    def attention(self, ops: Sequence[Op]) -> Purposes:
        """Attention of rows that follow each other to the keys before them and their own."""
        partial, merge = ops
        window = partial.attrs["window"]
        assert window is None or isinstance(window, int)
        heads, head = self._dim(partial.inputs[0], 1), self._dim(partial.inputs[0], 2)
        group = heads // self._dim(partial.inputs[1], 2)
        padded = power_of_two(group)
        rows, tile, warps = ATTENTION[window is not None]
        sinks = len(merge.inputs) > 5
        params = {"q": _BF16, "kv": _BF16} | ({"sinks": _F32} if sinks else {}) | {"y": _BF16}
        params |= dict.fromkeys(("rows", "offset", "keys"), _INT)
        constants = {
            "SCALE": _number(partial, "scale"), "HEADS": heads, "GROUP": group, "GROUP_ROWS": padded, "HEAD": head,
            "CHANNELS": power_of_two(head), "TOKENS": max(1, rows // padded), "TILE": tile,
            "WINDOW": window or 0,
        }  # fmt: skip
        blocks = {"windowed": window is not None, "sinks": sinks}
        name = f"rows_attention_w{window}" if window else "rows_attention"
        doc = "Attention of a block of rows, for the query heads of one key head."
        run = self._add(name, "rows_attention.py.j2", doc, params, constants, blocks, warps=warps, stages=3)
        return {"run": run, "step": self._step_attention(partial, merge)}

    def _step_attention(self, partial: Op, merge: Op) -> str:
        """The decode step's own kernel, each row of a sequence of its own; it does not wait."""
        launch = Launch(partial.name, "attention", (partial.name, merge.name))
        found = step_attention(self.graph, launch, STEP_PARTIALS)
        return self._keep(replace(found, name=f"rows_{found.name}_step"))

    def experts(self, ops: Sequence[Op]) -> Purposes:
        """The choice of experts, rows grouped by expert, and the two grouped products."""
        _, topk, gate_up, _, down = ops
        first = self._ordered(gate_up.inputs[0])
        # Its rows come in the order of words if the product before leaves them so.
        both = first and self._packs(down)
        return {
            "topk": self._topk(topk),
            "group": self._group(topk),
            "gate_up": self._packed(gate_up, topk, both) if first else self._grouped(gate_up, topk),
            "down": self._packed(down) if both else self._grouped(down),
            **({} if both else self._unpack(gate_up.inputs[2], False)),
        }

    def _packs(self, op: Op) -> bool:
        """Whether packed weights can go straight into the products with one expert's rows."""
        weight = self.graph.values[op.inputs[2]].type
        rows, k = self._dim(op.inputs[2], 1), self._dim(op.inputs[2], 2)
        return weight.dtype == "nvfp4" and k % WORD_COLUMNS == 0 and rows % 64 == 0

    def _ordered(self, value: str) -> bool:
        """Whether ``value`` has its columns in the order of words: experts want it so, and all who read it can."""
        readers = [self.graph.ops[name] for name in self.graph.consumers[value]]
        able = all(
            op.kind == "router" or (op.kind == "expert_linear" and self._packs(op)) or self._unpacks(op)
            for op in readers
        )
        return able and any(op.kind == "expert_linear" for op in readers)

    def _unpacks(self, op: Op) -> bool:
        return op.kind == "linear" and self.graph.values[op.inputs[1]].type.dtype == "nvfp4"

    def _topk(self, op: Op) -> str:
        experts, chosen = self._dim(op.inputs[0], 1), self._dim(op.outputs[0], 1)
        # The order of columns that the rows come in is the router's too: the runtime arranges its parts accordingly.
        params = {"parts": _F32, "ids": _I32, "weights": _F32, "places": _I32, "counts": _I32}
        constants = {
            "EXPERTS": experts, "CHOSEN": chosen, "PARTS": ROUTER_PARTS, "SOFTMAX": op.attrs["score"] == "softmax",
            "RENORMALIZE": op.attrs["renormalize"] is True,
        }  # fmt: skip
        doc = "A row's best experts, their weights, and the row's place among those of each."
        return self._add(f"rows_topk_{chosen}of{experts}", "rows_topk.py.j2", doc, params, constants, warps=1)

    def _group(self, op: Op) -> str:
        experts = self._dim(op.inputs[0], 1)
        params = dict.fromkeys(("counts", "ids", "places", "order", "tiles"), _I32) | {"pairs": _INT, "table": _INT}
        constants = {"EXPERTS": experts, "BLOCK": 128, "ROWS": EXPERT_ROWS, "TILES": 16}
        doc = "Pairs of a row and a chosen expert in the order of experts, and the tiles they make up."
        return self._add(f"rows_group_{experts}", "rows_group.py.j2", doc, params, constants)

    def _grouped(self, op: Op, topk: Op | None = None) -> str:
        """Products with one expert's rows, weights in BF16; with ``topk`` they are gate and up."""
        product, n, k = self._expert(op, topk)
        scaled = self.graph.values[op.inputs[2]].type.dtype == "nvfp4"
        params = {"x": _BF16, "weight": _BF16} | ({"scale": _F32} if scaled else {})
        columns, warps, stages = EXPERT_TILES[product, False]
        step = min(EXPERT_STEP, max(16, power_of_two(k)))
        constants = {"N": n, "K": k, "COLUMNS": min(columns, max(16, power_of_two(n))), "STEP": step}
        blocks = {"gated": topk is not None, "scaled": scaled, "packed": False}
        return self._product(f"rows_expert_{product}_{n}x{k}", topk, params, constants, blocks, warps, stages)

    def _packed(self, op: Op, topk: Op | None = None, ordered: bool = False) -> str:
        """The same with packed weights, dequantised on their way; ``ordered``: the output in the order of words."""
        product, n, k = self._expert(op, topk)
        assert in_blocks(self._dim(op.inputs[2], 1), k)
        columns, warps, stages = EXPERT_TILES[product, True]
        while n % columns:
            columns //= 2
        turns = n // columns
        while turns > EXPERT_BLOCKS and turns % 2 == 0:
            turns //= 2
        more: Constants = {"BLOCKS": turns} if topk is None else {"ORDERED": ordered}
        constants = {"N": n, "K": k, "COLUMNS": columns, **more}
        params = {"x": _BF16, "codes": _U8, "scales": _U8, "scale": _F32}
        blocks = {"gated": topk is not None, "scaled": True, "packed": True}
        return self._product(f"rows_expert_{product}_{n}x{k}_packed", topk, params, constants, blocks, warps, stages)

    def _expert(self, op: Op, topk: Op | None) -> tuple[str, int, int]:
        """What an expert's product is called, its output columns, and K."""
        rows, k = self._dim(op.inputs[2], 1), self._dim(op.inputs[2], 2)
        return ("down", rows, k) if topk is None else ("gate_up", rows // 2, k)

    def _product(
        self,
        name: str,
        topk: Op | None,
        params: Mapping[str, str],
        constants: Constants,
        blocks: Mapping[str, bool],
        warps: int,
        stages: int,
    ) -> str:
        """A kernel over tiles of one expert's rows; with ``topk`` for gate and up, whose rows are of the prompt."""
        params = {**params, "y": _BF16, "order": _I32, "tiles": _I32}
        constants = {**constants, "ROWS": EXPERT_ROWS}
        if topk is not None:
            constants["CHOSEN"] = self._dim(topk.outputs[0], 1)
        doc = "Rows of one expert times its " + ("down." if topk is None else "gate and up, and the activation.")
        return self._add(name, "rows_experts.py.j2", doc, params, constants, blocks, warps, stages)

    def _unpack(self, weight: str, ordered: bool) -> Purposes:
        if self.graph.values[weight].type.dtype != "nvfp4":
            return {}
        params = {"codes": _U8, "scales": _U8, "y": _BF16, "lanes": _INT, "row": _INT}
        doc = "Packed codes times their block scales, in units of 1/128: exact in BF16."
        name = "rows_unpack" + "_ordered" * ordered
        return {"unpack": self._add(name, "unpack.py.j2", doc, params, {"LANES": 256}, {"ordered": ordered})}

    def _add(
        self,
        name: str,
        template: str,
        doc: str,
        params: Mapping[str, str],
        constants: Constants,
        blocks: Mapping[str, str | bool] | None = None,
        warps: int = 4,
        stages: int = 1,
    ) -> str:
        """A kernel whose parameters are ``params``, pointers without ``_ptr``; returns its name."""
        made = tuple(_param(n, t) for n, t in params.items())
        return self._keep(
            Selection(name, template, doc, blocks or {}, made, (), constants, (1, 1, 1), (), warps, stages)
        )

    def _keep(self, selection: Selection) -> str:
        """Render a kernel, unless one like it is there; returns its name, numbered where another has taken it."""
        return self.table.keep(selection.structure, selection.name, partial(_kernel, selection))

    def _dim(self, value: str, axis: int) -> int:
        size = self.graph.values[value].type.shape[axis]
        assert isinstance(size, int)
        return size


def _kernel(selection: Selection, name: str) -> Kernel:
    return Kernel(
        name, render_kernel(selection, name), selection.params, dict(selection.constants), selection.num_warps,
        selection.num_stages, False,
    )  # fmt: skip


def _param(name: str, type: str) -> Param:
    kind: ParamType = type  # type: ignore[assignment]
    return Param(f"{name}_ptr", kind) if type.startswith("*") else Param(name, kind, aligned=False)


def _number(op: Op, attr: str) -> float:
    value = op.attrs[attr]
    assert isinstance(value, int | float)
    return float(value)
