"""Plans with broken buffers, lifetimes, caches, rings, order and dataflow: none that is unsafe may pass."""

from __future__ import annotations

import pytest
from judge import judge, share
from mutants_of_memory import MEMORY_KINDS

#: Of each kind; ``tests/safety/judge.py --mutants N`` runs more.
MUTANTS = 300


@pytest.fixture(scope="module")
def unsafe() -> list[int]:
    return []


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_no_unsafe_mutant_is_accepted(kind: str, unsafe: list[int]) -> None:
    tally = judge(kind, share(kind, MUTANTS), seed=1)
    assert not tally.accepted
    unsafe.append(tally.unsafe)


def test_there_were_enough_of_them(unsafe: list[int]) -> None:
    assert sum(n > 0 for n in unsafe) >= 10
    assert sum(unsafe) >= 2500
