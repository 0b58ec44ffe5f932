"""Plans with broken waits, triggers, loads, stores and counters: none that is unsafe may pass."""

from __future__ import annotations

import pytest
from judge import judge, share
from mutants_of_chain import CHAIN_KINDS

#: Of each kind; ``tests/safety/judge.py --mutants N`` runs more.
MUTANTS = 250


@pytest.fixture(scope="module")
def unsafe() -> list[int]:
    return []


@pytest.mark.parametrize("kind", CHAIN_KINDS)
def test_no_unsafe_mutant_is_accepted(kind: str, unsafe: list[int]) -> None:
    tally = judge(kind, share(kind, MUTANTS), seed=1)
    assert not tally.accepted
    unsafe.append(tally.unsafe)


def test_there_were_enough_of_them(unsafe: list[int]) -> None:
    assert sum(n > 0 for n in unsafe) >= 12
    assert sum(unsafe) >= 2500
