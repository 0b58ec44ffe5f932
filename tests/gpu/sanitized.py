"""Run under compute-sanitizer: launches of tiny-flint with every tensor in an allocation of its own.

Usage: python sanitized.py WEIGHTS [POSITION]. A POSITION outside the context is there to be found. The kernels must be
compiled, and in the cache, already.
"""

from __future__ import annotations

import sys

import torch
from replay_cases import make_replay
from test_gpu_replay import STEPS


def main(weights: str, position: int | None) -> None:
    """Every step of the replay tests, launch by launch, and the choice of tokens; then single rows."""
    for rows in (8, 1):
        replay = make_replay(weights, rows)
        for row, top_k in enumerate((1, 20, 64, 1, 5, 3, 2, 40)[:rows]):
            # 1.0 as the high word of temperature and of top-p; 500 of the 512 ids may be chosen.
            request = [0, 0x3FF00000, 0, 0x3FF00000, 7, 0, top_k, 500]
            replay.step.sampler["requests"][row] = torch.tensor(request, dtype=torch.int32, device="cuda")
        for seed, positions, seqs in STEPS:
            replay.set_rows(seed, positions[:rows] if position is None else [position] * rows, seqs[:rows])
            replay.step.run(rows, "tokens")
            torch.cuda.synchronize()
        tokens = replay.step.sampler["tokens"]
        assert bool(((tokens >= 0) & (tokens < 500)).all())
    print("ran")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
