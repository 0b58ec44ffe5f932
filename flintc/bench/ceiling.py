"""The rate at which this GPU reads its memory: the ceiling every timing is set beside, measured in the same run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flintc.bench.timing import median_ms

_BLOCK, _STEPS = 8192, 16


@triton.jit  # type: ignore[untyped-decorator]
def _read(x_ptr, sums_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    x_ptr += program.to(tl.int64) * BLOCK * STEPS
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total ^= tl.load(x_ptr + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(total, 0))


def read_ceiling(device: str = "cuda", nbytes: int = 1 << 32) -> float:
    """Bytes per second of a plain kernel that reads ``nbytes`` of random data once."""
    x = torch.randint(0, 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=device)
    programs = x.numel() // (_BLOCK * _STEPS)
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    ms = median_ms(lambda: _read[(programs,)](x, sums, _BLOCK, _STEPS, num_warps=8), repeats=20)
    return programs * _BLOCK * _STEPS * 4 / ms * 1e3
