"""The rate at which this GPU reads its memory: the ceiling every timing is set beside, measured in the same run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flintc.bench.timing import median_ms, us_in_chain

_BLOCK, _STEPS = 8192, 16
_SHARE_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _read(x_ptr, sums_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    x_ptr += program.to(tl.int64) * BLOCK * STEPS
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total ^= tl.load(x_ptr + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _read_share(x_ptr, sums_ptr, share, BLOCK: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    x_ptr += program.to(tl.int64) * share
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, share, BLOCK * AHEAD):
        for i in tl.static_range(AHEAD):
            at = begin + i * BLOCK + tl.arange(0, BLOCK)
            total ^= tl.load(x_ptr + at, mask=at < share, other=0)
    tl.store(sums_ptr + program, tl.sum(total, 0))


def read_launches(nbytes: int, launches: int, programs: int, device: str = "cuda") -> tuple[int, float]:
    """(bytes, microseconds) of a launch that only reads, in a CUDA graph of its kind.

    nbytes: shared by so many programs in whole blocks, hence a little less. Each launch reads memory of its own. They
    follow one another without dependent launch.
    """
    share = nbytes // (4 * programs * _SHARE_BLOCK) * _SHARE_BLOCK
    count = share * programs
    x = torch.randint(0, 2**31 - 1, (launches, count), dtype=torch.int32, device=device)
    sums = torch.empty(programs, dtype=torch.int32, device=device)

    def run() -> None:
        for part in x:
            _read_share[(programs,)](part, sums, share, _SHARE_BLOCK, 8, num_warps=4)

    def capture(times: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                run()
        return graph

    run()  # compiled before it is captured
    return count * 4, us_in_chain(capture, repeats=10) / launches


def read_ceiling(device: str = "cuda", nbytes: int = 1 << 32) -> float:
    """Bytes per second of a plain kernel that reads ``nbytes`` of random data once."""
    x = torch.randint(0, 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=device)
    programs = x.numel() // (_BLOCK * _STEPS)
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    ms = median_ms(lambda: _read[(programs,)](x, sums, _BLOCK, _STEPS, num_warps=8), repeats=20)
    return programs * _BLOCK * _STEPS * 4 / ms * 1e3
