"""Hazards of dependent launch on the device: whatever is stale, slow or overlapped, the bits stay the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_cases import POSITIONS
from replay_cases import Replay, compiled, hasty, make_replay, planned, same, slowed
from torch import Tensor

pytestmark = pytest.mark.gpu

WEIGHTS = ("bf16", "nvfp4")
SEQS = (3, 0, 6, 1, 4, 7, 2, 5)
#: Steps that differ in every input: tokens, positions, sequences, and which rows are padding.
STEPS = (
    (1, POSITIONS, SEQS),
    (2, tuple(reversed(POSITIONS)), SEQS),
    (3, (511, 0, 100, 15, 16, 17, 255, 256), (0, 1, -1, 3, 4, -1, 6, 7)),
    (4, (300, 301, 302, 303, 0, 1, 2, 3), (5, 5, 5, 5, 1, 1, 1, 1)),
)


def results(replay: Replay) -> list[dict[str, Tensor]]:
    """What each of STEPS leaves, replayed one after the other."""
    left = []
    for seed, positions, seqs in STEPS:
        replay.set_rows(seed, positions[: replay.rows], seqs[: replay.rows])
        left.append(replay.replayed())
    return left


@pytest.fixture(scope="module", params=WEIGHTS)
def plain(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Tensor]]]:
    """Weights format, and what STEPS leave without any overlap."""
    return request.param, results(make_replay(request.param, 8, dependent=False))


def test_steps_differ_and_are_finite(plain: tuple[str, list[dict[str, Tensor]]]) -> None:
    _, left = plain
    for (_, _, seqs), step in zip(STEPS, left, strict=True):
        live = torch.tensor(seqs, device="cuda") >= 0
        assert step["logits"].view(torch.float32)[live].isfinite().all()
    assert all(same(a, b) for i, a in enumerate(left) for b in left[:i])


def test_overlap_changes_no_bit(plain: tuple[str, list[dict[str, Tensor]]]) -> None:
    weights, expected = plain
    replay = make_replay(weights, 8)
    for _ in range(2):
        for got, want in zip(results(replay), expected, strict=True):
            assert same(got, want) == []


def test_a_thousand_replays(plain: tuple[str, list[dict[str, Tensor]]]) -> None:
    weights, expected = plain
    replay = make_replay(weights, 8)
    seed, positions, seqs = STEPS[0]
    replay.set_rows(seed, positions, seqs)
    replay.reset_caches()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    logits = replay.step.value("logits", 8).view(torch.uint8)
    for _ in range(1000):
        replay.poison()
        replay.step.replay(8)
        differing += (logits != expected[0]["logits"]).any()
    assert differing.item() == 0
    assert same(replay.left(), expected[0]) == []
    assert not any(counters.any() for counters in replay.step.scratch.values())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_slow_producer(weights: str) -> None:
    """Each kernel in turn idles after its wait, long after its dependents have been let go."""
    expected = results(make_replay(weights, 8, dependent=False))
    kernels = {name: kernel for name, kernel in planned(weights).kernels.items() if kernel.waits}
    slow = compiled([slowed(kernel) for kernel in kernels.values()])
    for name in kernels:
        for got, want in zip(results(make_replay(weights, 8, {name: slow[name]})), expected, strict=True):
            assert same(got, want) == [], f"{name} is slow"


def test_a_missing_wait_shows() -> None:
    """The tests above can fail: with a product that does not wait for a slow attention, they would.

    In a process of its own: what runs too early may overwrite ids of experts, and so end in an illegal access.
    """
    code = "import test_gpu_replay; print(test_gpu_replay.differs_without_a_wait())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert ran.stdout == "True\n" or "illegal memory access" in ran.stderr, ran.stderr


def differs_without_a_wait() -> bool:
    kernels = planned("bf16").kernels
    producers = [slowed(kernel) for name, kernel in kernels.items() if name.startswith("attention")]
    (consumer,) = (k for n, k in kernels.items() if n.startswith("linear_128x128") and "f32" not in n)
    expected = results(make_replay("bf16", 8, dependent=False))
    broken = make_replay("bf16", 8, compiled([*producers, hasty(consumer)]))
    return any(same(got, want) for got, want in zip(results(broken), expected, strict=True))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(weights: str) -> None:
    """One long and seven short sequences: each gets the logits and the cache that it gets alone."""
    positions = (500, 9, 1, 2, 8, 4, 5, 7)
    batch = make_replay(weights, 8)
    batch.set_rows(11, positions, SEQS)
    together = batch.replayed()
    ids = batch.step.tensors["ids"]
    assert isinstance(ids, Tensor)
    alone = make_replay(weights, 1)
    caches: dict[str, Tensor] = {}
    alone.reset_caches()
    for row in range(8):
        alone.set_rows(0, positions[row : row + 1], SEQS[row : row + 1])
        one = alone.step.tensors["ids"]
        assert isinstance(one, Tensor)
        one[:1] = ids[row : row + 1]
        alone.poison()
        alone.step.replay(1)
        caches = alone.left()
        assert torch.equal(caches.pop("logits"), together["logits"][row : row + 1]), f"row {row}"
    assert same(caches, together) == []


@pytest.mark.parametrize("rows", [2, 3, 5, 8])
def test_padded_rows_do_nothing(rows: int) -> None:
    """A batch of one row padded up to ``rows``: the same logits, and no cache is touched beyond that row's own."""
    alone = make_replay("bf16", 1)
    alone.set_rows(5, (77,), (2,))
    expected = alone.replayed()
    padded = make_replay("bf16", rows)
    padded.set_rows(5, (77, *[0] * (rows - 1)), (2, *[-1] * (rows - 1)))
    got = padded.replayed()
    assert torch.equal(got.pop("logits")[:1], expected.pop("logits"))
    assert same(got, expected) == []
