"""How much of a GPU's memory the KV cache may take."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flintc.errors import CapacityError
from flintc.ir.plan import Plan
from flintc.runtime.kv import KvLayout

#: Bytes left to the driver, to captured graphs, and to what torch allocates when it chooses tokens.
RESERVE = 1 << 30


def free_bytes(device: torch.device | None = None) -> int:
    """Memory that this process can still take, with what torch holds of an earlier model but does not use."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def symbols_of(layout: KvLayout, context: int, slots: int, positions: int) -> dict[str, int]:
    """Run-time symbols but for ``B`` and ``P``; ``positions`` are those that the RoPE tables cover."""
    return {"Q": slots, "T": -(-context // layout.page), "C": positions}


def workspace_bytes(plan: Plan, symbols: Mapping[str, int]) -> int:
    """Bytes of activations, counters and the sampler's memory; ``symbols`` give ``B`` as the largest batch."""
    memory = {**plan.scratch, **(plan.sampler.memory if plan.sampler else {})}
    buffers = sum(b.nbytes(symbols) for b in plan.buffers.values())
    return buffers + sum(s.type.nbytes(symbols) for s in memory.values())


def pool_pages(layout: KvLayout, context: int, slots: int, free: int) -> int:
    """KV pages for every slot to hold ``context`` tokens, or as many as ``free`` bytes allow.

    CapacityError where not even one sequence of ``context`` tokens fits, saying how long one may be.
    """
    columns = -(-context // layout.page)
    if layout.table is None:
        return slots * columns
    left = max(0, free - RESERVE - slots * layout.ring_bytes())
    pages = min(slots * columns, left // layout.page_bytes())
    if pages < columns:
        raise CapacityError(
            f"a sequence of {context} tokens needs {columns * layout.page_bytes() / 1e9:.2f} GB of KV cache; "
            f"beside the weights and the workspace {left / 1e9:.2f} GB of GPU memory are left",
            remedy=f"load with context={pages * layout.page} or less" if pages else "use a GPU with more memory",
        )
    return pages
