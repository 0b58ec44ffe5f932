"""The hand-over to the last few programs, in many orders: Triton's interpreter ends one before it begins the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from types import FunctionType, SimpleNamespace

import pytest

from flintc.codegen.device import sync

MOST_TURNS = 5000


class Programs:
    """Runs functions of :mod:`flintc.codegen.device.sync`, one access to the counter at a time, in a random order."""

    def __init__(self, seed: int) -> None:
        self.counter = 0
        self._chance = Random(seed)
        self._ready: dict[int, threading.Event] = {}
        self._changed = threading.Condition()
        self._running = 0

    def function(self, name: str) -> Callable[..., object]:
        """The helper, its accesses to memory taken in turns."""
        tl = SimpleNamespace(debug_barrier=lambda: None, atomic_add=self._add, store=self._store)
        plain = getattr(sync, name).fn
        return FunctionType(plain.__code__, {"tl": tl})

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run all ``bodies`` to their ends, which a sound hand-over reaches in far fewer turns than are taken here."""
        self._running = len(bodies)
        for body in bodies:
            threading.Thread(target=self._program, args=(body,), daemon=True).start()
        for _ in range(MOST_TURNS):
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) == self._running)
                if not self._running:
                    return
                turn = self._ready.pop(self._chance.choice(sorted(self._ready)))
            turn.set()
        pytest.fail("some program waits for ever")

    def _program(self, body: Callable[[], None]) -> None:
        body()
        with self._changed:
            self._running -= 1
            self._changed.notify()

    def _turn(self) -> None:
        turn = threading.Event()
        with self._changed:
            self._ready[threading.get_ident()] = turn
            self._changed.notify()
        turn.wait()

    def _add(self, pointer: None, value: int, sem: str, scope: str) -> int:
        self._turn()
        before, self.counter = self.counter, self.counter + value
        return before

    def _store(self, pointer: None, value: int) -> None:
        self._turn()
        self.counter = value


@pytest.mark.parametrize("waiting", [7, 96])
@pytest.mark.parametrize("groups", [1, 4, 32, 96, 97, 256])
def test_no_more_wait_than_are_sure_to_leave_places(waiting: int, groups: int) -> None:
    """On a GPU; in the interpreter, where nobody can wait, one goes on."""
    few_of = sync.few_of.fn
    on_gpu = FunctionType(few_of.__code__, {"tl": SimpleNamespace(minimum=min), "INTERPRET": False})
    for most in (1, 3, 8, 32):
        few = on_gpu(groups, most, waiting)
        assert 1 <= few <= most and (few - 1) * groups <= waiting
        assert few == most or few * groups > waiting
        assert FunctionType(few_of.__code__, {"INTERPRET": True})(groups, most, waiting) == 1


@pytest.mark.parametrize(("group", "few"), [(1, 1), (5, 1), (5, 3), (6, 6), (18, 8)])
@pytest.mark.parametrize("seed", range(20))
def test_the_last_few_go_on_once_all_have_arrived(group: int, few: int, seed: int) -> None:
    programs = Programs(seed)
    arrive, leave = programs.function("arrive_few"), programs.function("leave_few")
    for _ in range(2):  # a replay finds the counter as the first run did
        stored: list[int] = []
        went_on: list[tuple[int, int]] = []

        def body(stored: list[int] = stored, went_on: list[tuple[int, int]] = went_on) -> None:
            stored.append(0)
            among, which = arrive(None, group, few)  # type: ignore[misc]
            if among:
                went_on.append((which, len(stored)))
                leave(None, few)

        programs.run([body] * group)
        assert sorted(went_on) == [(which, group) for which in range(few)]
        assert programs.counter == 0
