"""Wide steps: the newest token of many sequences, a row each, through the routines that serve prompts.

Only heads and attention tell rows of one sequence from rows of many: these two are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flintc.ir.plan import General, Kernel, Routine
from flintc.runtime.prefill.launch import names_of
from flintc.runtime.prefill.routines import OF_ANY_ROWS, Given, Values, finish_heads


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a wide step: ids, positions and seqs i32[rows], each row of a sequence of its own, -1: of none.

    tables: block tables by name, i32[slots, columns]. counters: zeros i32, as many as :func:`counters_of` says; steps
    after each other share them.
    All on one device. A row of no sequence stores no keys and attends to none; what is computed of it means nothing.
    """

    ids: Tensor
    positions: Tensor
    seqs: Tensor
    tables: Mapping[str, Tensor]
    counters: Tensor

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.ids.shape[0]


def serves_steps(general: General) -> bool:
    """Whether a general path has the kernels of wide steps."""
    return all("step" in r.kernels for r in general.routines if r.kind in ("heads", "attention"))


def counters_of(general: General, rows: int) -> int:
    """Arrival counters that a wide step of ``rows`` rows needs."""
    kernels = (general.kernels[r.kernels["step"]] for r in general.routines if r.kind == "attention")
    return max((int(k.constants["KV_HEADS"]) * rows for k in kernels), default=0)


def partials_of(constants: Mapping[str, int | float | bool]) -> int:
    """Partials of a row and head: as many as a window has chunks, else as many as programs that share a head."""
    return int(constants.get("SPLITS", constants["PROGRAMS"]))


def step_bytes(general: General, rows: int) -> int:
    """Bytes of the partials and counters of a wide step, the most of any layer."""
    most = 0
    for routine in (r for r in general.routines if r.kind == "attention"):
        constants = general.kernels[routine.kernels["step"]].constants
        heads = int(constants["KV_HEADS"]) * int(constants["GROUP"])
        most = max(most, rows * heads * partials_of(constants) * (int(constants["HEAD"]) + 2) * 4)
    return most + 4 * counters_of(general, rows)


def heads(given: Given, routine: Routine, step: StepRows, values: Values) -> None:
    """Queries, and keys and values into the cache, whose new version is its memory."""
    (write,) = given.ops(routine)["kv_write"]
    cache, table = given.tensor(write.inputs[2]), step.tables[write.inputs[5]]
    finish_heads(
        given, routine, "step", values, positions=step.positions, seqs=step.seqs, block_table=table, cache=cache,
        columns=table.shape[1],
    )  # fmt: skip
    values[write.outputs[0]] = cache


def attention(given: Given, routine: Routine, step: StepRows, values: Values) -> None:
    """Attention of each row to its own sequence, split over programs that merge what they found."""
    ops = given.ops(routine)
    (partial,), (merge,) = ops["attention_partial"], ops["attention_merge"]
    q, kernel, table = values[partial.inputs[0]], given.kernel(routine, "step"), step.tables[partial.inputs[4]]
    rows, heads, channels = q.shape
    kv_heads, splits = int(kernel.constants["KV_HEADS"]), partials_of(kernel.constants)
    partials = rows * heads * splits
    o = torch.empty(partials * channels, dtype=torch.float32, device=q.device)
    m, l = torch.empty((2, partials), dtype=torch.float32, device=q.device)
    y = torch.empty((rows, heads * channels), dtype=q.dtype, device=q.device)
    arguments: dict[str, Tensor | int] = {
        "q": q, "cache": values[partial.inputs[1]], "positions": step.positions, "seqs": step.seqs,
        "block_table": table, "o": o, "m": m, "l": l, "y": y, "columns": table.shape[1],
        "rows": step.counters,
    }  # fmt: skip
    if len(merge.inputs) > 5:
        arguments["sinks"] = given.tensor(merge.inputs[5])
    given.launch(kernel, (rows, kv_heads, int(kernel.constants["PROGRAMS"])), **_taken(kernel, arguments))
    values[merge.outputs[0]] = y


def _taken(kernel: Kernel, arguments: Mapping[str, Tensor | int]) -> dict[str, Tensor | int]:
    """Those of ``arguments`` that the kernel takes: what is fixed in it, it does not."""
    return {name: arguments[name] for name in names_of(kernel)}


#: Kind of routine -> its function in a wide step.
STEP_ROUTINES: Mapping[str, Callable[[Given, Routine, StepRows, Values], None]] = {
    **OF_ANY_ROWS,
    "heads": heads,
    "attention": attention,
}
