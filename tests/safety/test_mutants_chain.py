"""Plans with broken waits, triggers, loads, stores and counters: none that is unsafe may pass."""

from __future__ import annotations

from collections import Counter

import pytest
from judge import REFUSED_IN, Tally, judge, share
from mutants_of_chain import CHAIN_KINDS

#: Of each kind; ``tests/safety/judge.py --mutants N`` runs more.
MUTANTS = 400


@pytest.fixture(scope="module")
def tallies() -> list[Tally]:
    return []


@pytest.mark.parametrize("kind", CHAIN_KINDS)
def test_no_unsafe_mutant_is_accepted(kind: str, tallies: list[Tally]) -> None:
    tally = judge(kind, share(kind, MUTANTS), seed=1)
    assert not tally.accepted
    tallies.append(tally)


def test_there_were_enough_of_them(tallies: list[Tally]) -> None:
    unsafe = [tally.unsafe for tally in tallies]
    assert sum(n > 0 for n in unsafe) >= 12
    assert sum(unsafe) >= 4000


@pytest.mark.parametrize("kind", REFUSED_IN)
def test_launches_of_every_kind_of_plan_were_among_them(kind: str, tallies: list[Tally]) -> None:
    """Of joined and of cut plans, those that take part in what the other kind does otherwise."""
    found = sum((tally.roles for tally in tallies), Counter[tuple[str, str]]())
    assert {role for role in REFUSED_IN[kind] if found[kind, role] < 20} == set()
