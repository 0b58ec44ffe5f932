"""An abstract machine that runs launches in every order that dependent launch allows, and watches what they read.

It is the ground truth for the checker and shares no code with it: where the checker reasons about sets of launches that
are complete, the machine executes programs step by step on memory cells. Every cell holds a token that names the value
it was written for; a program that reads a token other than the one it expects has met a hazard.

Rules of the machine, and nothing else: a launch without the attribute starts once everything before it is complete;
one with it, once each program of the launch before has triggered or ended. A wait returns once the launch before is
complete. Programs of all launches that have started run in any order, one step at a time. What a launch wrote is
nobody else's to touch until it is complete: nothing says when it becomes visible.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Cell = Hashable
Token = Hashable

#: Launches run on between two looks at whether all is as usual again.
FEW = 8

#: What nobody expects to read.
GARBAGE: Token = "garbage"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    kind: wait, trigger, read (``cells`` must hold ``tokens``), write, arrive (at ``counter``, the last of ``group`` to
    do so), reset (``counter``), fault (an access outside of all memory). under: counters at which the program must have
    been the last arriver, else it skips the step.
    """

    kind: str
    cells: tuple[Cell, ...] = ()
    tokens: tuple[Token, ...] = ()
    counter: Cell = None
    group: int = 0
    under: tuple[Cell, ...] = ()


Program = tuple[Step, ...]


@dataclass(frozen=True)
class Grid:
    """One launch: its programs, and whether it has the dependent-launch attribute.

    stalls: (program, step) at which holding a program back may matter; the rest is symmetric to one of these.
    """

    name: str
    programs: tuple[Program, ...]
    attribute: bool
    stalls: tuple[tuple[int, int], ...] = ()


class Met(Exception):
    """A hazard was met; the message says where."""


@dataclass
class State:
    """Everything that changes while launches run."""

    memory: dict[Cell, Token]
    counters: dict[Cell, int]
    #: Launch that wrote a cell last.
    writers: dict[Cell, int] = field(default_factory=dict)
    #: First launch that is not complete, and number of launches started.
    front: int = 0
    started: int = 0
    at: dict[tuple[int, int], int] = field(default_factory=dict)
    lost: dict[tuple[int, int], frozenset[Cell]] = field(default_factory=dict)
    #: Programs that skipped something they should have read: what they write from then on is garbage.
    blind: set[tuple[int, int]] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    released: dict[int, set[int]] = field(default_factory=dict)

    def copy(self) -> State:
        """A state of its own. Only between launches, when none is running."""
        return State(dict(self.memory), dict(self.counters), dict(self.writers), self.front, self.started)


class Machine:
    """Runs ``grids`` in stream order on memory that begins as ``memory``; counters begin at zero."""

    def __init__(self, grids: Sequence[Grid], memory: dict[Cell, Token]) -> None:
        self.grids = grids
        self._begin = State(dict(memory), {})

    def hazard(self, first: Sequence[int] = (), stalled: int | None = None, shuffles: int = 0, seed: int = 0) -> str:
        """What goes wrong in some order of steps; empty if nothing does in any order tried.

        Tried are: launches one after the other; for each point of each of the first ``stalled`` launches, everything
        else as far as it can go while one program is held back there; and ``shuffles`` random orders. Launches in
        ``first`` are held back first, which changes nothing but the time it takes to find a hazard.
        """
        snapshots: list[State] = []
        try:
            state = self._begin.copy()
            for index in range(len(self.grids)):
                snapshots.append(state.copy())
                self._run(state, index + 1)
            last = len(self.grids) if stalled is None else stalled
            order = [*(i for i in first if i < last), *(i for i in range(last) if i not in first)]
            for index in order:
                for program, step in self.grids[index].stalls:
                    state = snapshots[index].copy()
                    self._run(state, len(self.grids), (index, program, step))
                    self._rejoin(state, snapshots)
            chance = random.Random(seed)
            for _ in range(shuffles):
                self._shuffle(self._begin.copy(), chance)
        except Met as met:
            return str(met)
        return ""

    def _rejoin(self, state: State, snapshots: list[State]) -> None:
        """Run on from ``state``, until memory is as it would have been in turn: then so is all that follows."""
        while state.front < len(self.grids):
            end = state.started
            self._run(state, end)
            if end < len(self.grids):
                usual = snapshots[end]
                if state.memory == usual.memory and state.counters == usual.counters:
                    return
                self._run(state, min(len(self.grids), end + FEW))

    def _run(self, state: State, end: int, hold: tuple[int, int, int] | None = None) -> None:
        """Advance everything before launch ``end`` as far as it goes; a held program stays before its step."""
        progress = True
        while progress and state.front < end:
            progress = False
            index = state.front
            while index < end and self._start(state, index):
                for number in range(len(self.grids[index].programs)):
                    limit = hold[2] if hold is not None and hold[:2] == (index, number) else None
                    progress |= self._advance(state, index, number, limit)
                self._move_front(state)
                index += 1
        if hold is None and state.front < end:
            raise Met(f"launch {self.grids[state.front].name} never ends")

    def _start(self, state: State, index: int) -> bool:
        """Whether launch ``index`` has started, starting it if it may."""
        if index < state.started:
            return True
        grid = self.grids[index]
        if index > state.started:
            return False
        if grid.attribute and index > 0:
            let_go = self._complete(state, index - 1) or len(state.released[index - 1]) == self._programs(index - 1)
        else:
            let_go = state.front == index
        if let_go:
            state.started += 1
            state.ended[index], state.released[index] = 0, set()
        return let_go

    def _advance(self, state: State, index: int, number: int, limit: int | None) -> bool:
        """Run one program until it waits, ends or is held back; whether it got anywhere."""
        key, program = (index, number), self.grids[index].programs[number]
        at = before = state.at.get(key, 0)
        if at > len(program):
            return False
        while at < len(program) and at != limit:
            step = program[at]
            if step.kind == "wait" and not self._complete(state, index - 1):
                break
            self._execute(state, index, number, step)
            at += 1
        if at == len(program) and limit != at:
            at += 1
            state.ended[index] += 1
            state.released[index].add(number)
        state.at[key] = at
        return at != before

    def _execute(self, state: State, index: int, number: int, step: Step) -> None:
        key = (index, number)
        lost = state.lost.get(key)
        if lost and not lost.isdisjoint(step.under):
            if step.kind == "read":
                state.blind.add(key)
            return
        match step.kind:
            case "read":
                self._need_settled(state, index, step)
                held = tuple(map(state.memory.get, step.cells))
                if held != step.tokens:
                    cell, found, token = next(
                        x for x in zip(step.cells, held, step.tokens, strict=True) if x[1] != x[2]
                    )
                    raise Met(f"launch {self.grids[index].name} finds {found} at {cell} in place of {token}")
            case "write":
                self._need_settled(state, index, step)
                tokens = step.tokens if key not in state.blind else (GARBAGE,) * len(step.cells)
                state.memory.update(zip(step.cells, tokens, strict=True))
                state.writers.update(dict.fromkeys(step.cells, index))
            case "arrive":
                count = state.counters.get(step.counter, 0)
                state.counters[step.counter] = count + 1
                if count != step.group - 1:
                    state.lost[key] = (lost or frozenset()) | {step.counter}
            case "reset":
                state.counters[step.counter] = 0
            case "trigger":
                state.released[index].add(number)
            case "fault":
                raise Met(f"launch {self.grids[index].name} looks up a page or an expert that is none")

    def _need_settled(self, state: State, index: int, step: Step) -> None:
        """Nobody touches what another launch wrote that is not complete."""
        front, writers = state.front, state.writers
        if state.started == front + 1:
            return  # no other launch is running
        for cell in step.cells:
            writer = writers.get(cell, -1)
            if writer >= front and writer != index and not self._complete(state, writer):
                name, other = self.grids[index].name, self.grids[writer].name
                raise Met(f"launch {name} touches {cell}, which launch {other} wrote and may not have published")

    def _shuffle(self, state: State, chance: random.Random) -> None:
        """One random order: in each turn, one program that can take a step takes a few."""
        while state.front < len(self.grids):
            while state.started < len(self.grids) and self._start(state, state.started):
                pass
            ready = [
                (i, n)
                for i in range(state.front, state.started)
                for n, program in enumerate(self.grids[i].programs)
                if self._may_step(state, i, n, program)
            ]
            if not ready:
                raise Met(f"launch {self.grids[state.front].name} never ends")
            # Now and then a later launch is favoured, as it is where a multiprocessor is free for it.
            index, number = ready[-1] if chance.random() < 0.3 else chance.choice(ready)
            at = state.at.get((index, number), 0)
            self._advance(state, index, number, at + chance.randint(1, 3))
            self._move_front(state)

    def _may_step(self, state: State, index: int, number: int, program: Program) -> bool:
        at = state.at.get((index, number), 0)
        if at > len(program):
            return False
        return at == len(program) or program[at].kind != "wait" or self._complete(state, index - 1)

    def _programs(self, index: int) -> int:
        return len(self.grids[index].programs)

    def _complete(self, state: State, index: int) -> bool:
        """Whether one launch is complete, whatever became of those before it."""
        return index < state.front or state.ended.get(index) == self._programs(index)

    def _move_front(self, state: State) -> None:
        while state.front < state.started and self._complete(state, state.front):
            state.front += 1
