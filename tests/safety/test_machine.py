"""The abstract machine on launches drawn by hand: it meets the hazards of dependent launch, and no others."""

from __future__ import annotations

import pytest
from machine import Grid, Machine, Program, Step

WAIT, TRIGGER = Step("wait"), Step("trigger")


def read(cell: str, token: str) -> Step:
    return Step("read", (cell,), (token,))


def write(cell: str, token: str) -> Step:
    return Step("write", (cell,), (token,))


def chain(*programs: Program, attribute: bool = True) -> Machine:
    """Launches of one program each, held back before every step and before the end."""
    grids = [
        Grid(f"launch {i}", (p,), attribute and i > 0, tuple((0, at) for at in range(len(p) + 1)))
        for i, p in enumerate(programs)
    ]
    return Machine(grids, {})


MAKE = (TRIGGER, WAIT, write("a", "a"))
PASS = (TRIGGER, WAIT, write("b", "b"))
USE = (TRIGGER, WAIT, read("a", "a"))


def test_a_sound_chain() -> None:
    assert chain(MAKE, PASS, USE).hazard(shuffles=20) == ""


@pytest.mark.parametrize(
    "programs",
    [
        (MAKE, (TRIGGER, read("a", "a"), WAIT)),  # a load above the wait, of what the launch before makes
        (MAKE, PASS, (TRIGGER, read("a", "a"), WAIT)),  # ... and of what the one before that makes
        (MAKE, (TRIGGER, write("b", "b")), USE),  # the one in between does not wait: nobody waits for the first
        (MAKE, USE, (TRIGGER, write("a", "c"), WAIT)),  # a store above the wait: the reader may come later
        ((TRIGGER, WAIT, read("a", "a")), MAKE),  # read before it is made
    ],
)
def test_hazards(programs: tuple[Program, ...]) -> None:
    assert chain(*programs).hazard() != ""


def test_a_late_trigger_publishes_nothing() -> None:
    """It lets the next launch start while the stores before it may still be on their way, or come after."""
    use = (TRIGGER, read("b", "b"), WAIT)
    assert "finds None" in chain(MAKE, (WAIT, TRIGGER, write("b", "b")), use).hazard()
    assert "may not have published" in chain(MAKE, (WAIT, write("b", "b"), TRIGGER), use).hazard()


def test_a_late_trigger_shows_that_the_launch_before_is_complete() -> None:
    late = (WAIT, TRIGGER, write("b", "b"))
    early = (TRIGGER, WAIT, write("b", "b"))
    use = (TRIGGER, read("a", "a"), WAIT)
    assert chain(MAKE, late, use).hazard(shuffles=20) == ""
    assert chain(MAKE, early, use).hazard() != ""


def test_without_the_attribute_launches_follow_each_other() -> None:
    assert chain((write("a", "a"),), (read("a", "a"),), attribute=False).hazard(shuffles=20) == ""


def arrive(group: int) -> Step:
    return Step("arrive", counter="c", group=group)


LAST = Step("read", ("a", "b"), ("a", "b"), under=("c",))
RESET = Step("reset", counter="c", under=("c",))


def group(*programs: Program, twice: bool = False) -> Machine:
    stalls = tuple((n, at) for n, p in enumerate(programs) for at in range(len(p)))
    return Machine([Grid("group", programs, False, stalls)] * (2 if twice else 1), {})


def test_the_last_arriver_sees_what_all_wrote() -> None:
    machine = group((write("a", "a"), arrive(2), LAST, RESET), (write("b", "b"), arrive(2), LAST, RESET), twice=True)
    assert machine.hazard(shuffles=20) == ""


def test_one_who_writes_after_arriving_is_not_seen() -> None:
    assert group((arrive(2), write("a", "a"), LAST), (write("b", "b"), arrive(2), LAST)).hazard() != ""


def test_a_counter_that_is_not_put_back_has_no_last_arriver_the_next_time() -> None:
    use = Step("write", ("y",), ("y",), under=("c",))
    clear, check = Step("write", ("y",), ("old",)), Step("read", ("y",), ("y",))
    steps = [Grid("clear", ((clear,),), False), Grid("group", ((arrive(2), use), (arrive(2), use)), False)]
    steps.append(Grid("check", ((check,),), False))
    assert Machine(steps, {}).hazard() == ""
    assert Machine(steps * 2, {}).hazard() != ""


def test_what_is_written_without_having_read_is_garbage() -> None:
    blind = Step("write", ("y",), ("y",))
    machine = group((write("a", "a"), arrive(2), LAST, blind), (write("b", "b"), arrive(2), LAST, blind))
    check = Grid("check", ((read("y", "y"),),), False)
    assert "garbage" in Machine([*machine.grids, check], {}).hazard()


def test_a_wait_that_nobody_answers() -> None:
    grids = [Grid("group", ((Step("arrive", counter="c", group=1),), (WAIT,)), False)]
    assert Machine(grids, {}).hazard() == ""  # the first launch has nobody to wait for
