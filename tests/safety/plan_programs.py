"""From a plan to the grids of the abstract machine: what each program of each launch does to which cells.

The plan is taken at its word (effects, arguments, placement); what ought to be read comes from its graph of ops. Each
value has five cells, of which a launch's programs write their shares; a program reads all of them. The fifth is the
padded rows', where a launch treats these apart. A cache has a cell per sequence and slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from machine import GARBAGE, Cell, Grid, Machine, Program, Step, Token

from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.plan import Arg, Effect, Kernel, Plan, PlannedLaunch
from flintc.ir.types import TensorType

CELLS = 5
#: Position of the first row of sequence 0: past the end of every ring of the test specs.
START = 70
#: Positions of the whole context that a row without a window is watched to read: the first, and the newest.
NEWEST = 6

Row = tuple[int, int]  # sequence (-1: padded), position

#: Rows of the two steps run, by batch: slices of one sequence, then several sequences and padding.
ROWS: Mapping[int, tuple[tuple[Row, ...], tuple[Row, ...]]] = {
    1: (((0, START),), ((0, START + 1),)),
    2: (((0, START), (0, START + 1)), ((0, START + 2), (-1, 0))),
    4: (
        tuple((0, START + i) for i in range(4)),
        ((0, START + 4), (0, START + 5), (1, 9), (-1, 0)),
    ),
    8: (
        tuple((0, START + i) for i in range(8)),
        (*((0, START + 8 + i) for i in range(4)), (1, 9), (-1, 0), (-1, 0), (-1, 0)),
    ),
}


class Senseless(Exception):
    """Run in turn, the plan computes something else than its graph: no order of steps is needed to see it."""


@dataclass(frozen=True)
class Ring:
    """Where a cache keeps positions: all of them, or the last ``slots``."""

    place: str
    window: int | None
    slots: int

    def cell(self, seq: int, position: int) -> Cell:
        return (self.place, seq, position % self.slots if self.window is not None else position)

    def seen(self, position: int) -> list[int]:
        """Positions that a row at ``position`` is watched to read."""
        if self.window is not None:
            return list(range(max(0, position - self.window + 1), position + 1))
        return sorted({0, *range(max(0, position - NEWEST + 1), position + 1)})


class Translator:
    """Translates plans at one batch size; keeps translations of launches that they share with ``known`` plans."""

    def __init__(self, batch: int, known: Iterable[Plan] = ()) -> None:
        self.batch = batch
        self.rows = ROWS[batch]
        self._known = tuple(known)  # kept alive, so that no other object takes their ids
        self._ids = {id(plan.graph) for plan in self._known}
        self._ids |= {id(x) for plan in self._known for x in (*plan.launches, *plan.kernels.values())}
        self._kept: dict[tuple[object, ...], Grid] = {}

    def machine(self, plan: Plan) -> Machine:
        """Two steps of ``plan`` with the caller before, between and after; Senseless if they compute nonsense."""
        scene = _Scene(plan, self.batch, self.rows)
        grids = [_caller(scene, 0)]
        for step in range(len(self.rows)):
            grids += [self._grid(scene, planned, step) for planned in plan.launches]
            grids.append(_caller(scene, step + 1))
        return Machine(grids, scene.beginning())

    def _grid(self, scene: _Scene, planned: PlannedLaunch, step: int) -> Grid:
        launch, kernel = scene.launches[planned.name], scene.plan.kernels[planned.kernel]
        ids = (id(planned), id(kernel), id(scene.graph))
        if not self._ids.issuperset(ids):
            return _Launch(scene, planned, kernel, launch, step).grid()
        cells = tuple(scene.cells(a.ref.partition("#")[0]) for a in planned.args if a.kind in ("value", "part"))
        key = (*ids, cells, step)
        if key not in self._kept:
            self._kept[key] = _Launch(scene, planned, kernel, launch, step).grid()
        return self._kept[key]


class _Scene:
    """A plan with its memory: where each value lives, and what it holds when."""

    def __init__(self, plan: Plan, batch: int, rows: tuple[tuple[Row, ...], ...]) -> None:
        self.plan, self.graph, self.rows = plan, plan.graph, rows
        self.launches = {x.name: x for x in plan.graph.launches}
        self.batch = batch
        self.rings = {op.outputs[0]: _ring(plan.graph, op) for op in plan.graph.ops.values() if op.kind == "kv_write"}
        self.rings |= {op.inputs[2]: self.rings[op.outputs[0]] for op in _writes(plan.graph)}
        self._cells: dict[str, tuple[Cell, ...]] = {}

    def cells(self, value: str) -> tuple[Cell, ...]:
        """The cells of a value; one that does not fit its buffer runs over into the next."""
        if value in self._cells:
            return self._cells[value]
        place = self.plan.placement.get(value, value)
        cells: list[Cell] = [(place, i) for i in range(CELLS)]
        if place != value:
            buffers = list(self.plan.buffers)
            buffer, following = self.plan.buffers[place], (buffers.index(place) + 1) % len(buffers)
            if _nbytes(self.graph.values[value].type, self.batch) > max(_nbytes(t, self.batch) for t in buffer.types):
                cells[-1] = (buffers[following], 0)
        self._cells[value] = tuple(cells)
        return self._cells[value]

    def token(self, value: str, step: int) -> Token:
        """What a value's cells hold in a step: weights and tables always the same."""
        kind = self.graph.values[value].kind if value in self.graph.values else "input"
        return value if kind in ("weight", "table") else (value, step)

    def read(self, value: str, step: int, cells: tuple[Cell, ...]) -> Step:
        return Step("read", cells, (self.token(value, step),) * len(cells))

    def beginning(self) -> dict[Cell, Token]:
        """Memory before the first step: constants, and the past of every sequence."""
        memory: dict[Cell, Token] = {}
        for value in self.graph.values.values():
            if value.kind in ("weight", "table"):
                memory |= dict.fromkeys(self.cells(value.name), value.name)
        for ring in self.rings.values():
            for seq in (0, 1):
                first = min((p for rows in self.rows for s, p in rows if s == seq), default=0)
                memory |= {ring.cell(seq, p): (ring.place, seq, p) for p in range(first)}
        return memory


@cache
def _nbytes(type: TensorType, batch: int) -> int:
    """Bytes of a type, in the units that buffers are made of."""
    return -(-type.nbytes({"B": batch}) // 256) * 256


def _writes(graph: Graph) -> Iterator[Op]:
    return (op for op in graph.ops.values() if op.kind == "kv_write")


def _ring(graph: Graph, write: Op) -> Ring:
    window, table = write.attrs["window"], graph.values[write.inputs[5]]
    page = graph.values[write.inputs[2]].type.shape[3]
    assert isinstance(page, int) and (window is None or isinstance(window, int))
    pages = table.type.shape[1] if window is not None else 1
    assert isinstance(pages, int)
    return Ring(write.inputs[2], window, pages * page)


def _caller(scene: _Scene, step: int) -> Grid:
    """What stands between steps: it looks at the outputs, then writes the next inputs, with nothing held back."""
    graph = scene.graph
    steps = [Step("trigger")]
    if step > 0:
        steps += [scene.read(v, step - 1, scene.cells(v)) for v in graph.outputs if graph.values[v].kind != "cache"]
    inputs = [v.name for v in graph.values.values() if v.kind == "input"]
    steps += [Step("write", scene.cells(v), (scene.token(v, step),) * CELLS) for v in inputs]
    return Grid("the caller", (tuple(steps),), False, ((0, 1),))


class _Launch:
    """Translates one launch in one step."""

    def __init__(self, scene: _Scene, planned: PlannedLaunch, kernel: Kernel, launch: Launch, step: int) -> None:
        self.scene, self.planned, self.kernel, self.launch, self.step = scene, planned, kernel, launch, step
        self.args: dict[str, Arg] = {p.name: a for p, a in zip(kernel.params, planned.args, strict=True)}
        depth = max((len(e.last) for path in kernel.paths for e in path), default=0)
        #: Programs that take each path, and the groups in which they arrive at counters of the first level.
        self.copies = 4 if depth > 1 else 2
        self.groups = 2 if depth > 1 else 1
        self.written = {self.value(e.param) for path in kernel.paths for e in path if e.kind == "write"}

    def value(self, param: str) -> str:
        return self.args[param].ref.partition("#")[0]

    def grid(self) -> Grid:
        """The launch as a grid; Senseless where it does not read what its ops read."""
        self._check_operands()
        programs: list[Program] = []
        stalls: list[tuple[int, int]] = []
        counts = any(e.kind == "arrive" for path in self.kernel.paths for e in path)
        for number, path in enumerate(self.kernel.paths):
            for copy in range(self.copies):
                if copy == 0 or (
                    counts and copy == self.copies - self.groups
                ):  # one who comes first, one who comes last
                    stalls += [(len(programs), at) for at in _segments(path)]
                programs.append(tuple(self._steps(number, copy)))
        return Grid(self.launch.name, tuple(programs), self.kernel.waits, tuple(stalls))

    def _check_operands(self) -> None:
        graph = self.scene.graph
        whole = (e for path in self.kernel.paths for e in path if e.kind == "read" and not self._earlier(e))
        read = {self._home(self.value(e.param)) for e in whole}
        for value in graph.reads(self.launch):
            readers = {graph.ops[o].kind for o in self.launch.ops if value in graph.ops[o].inputs}
            only_extended = readers == {"kv_write"} and graph.values[value].kind == "cache"
            if not only_extended and self._home(value) not in read:
                raise Senseless(f"{self.launch.name} computes without {value}")

    def _home(self, value: str) -> str:
        """Versions of a cache are one memory."""
        return self.scene.rings[value].place if value in self.scene.rings else value

    def _steps(self, path: int, copy: int) -> Program:
        steps = []
        for effect in self.kernel.paths[path]:
            if effect.kind == "hint" or (effect.kind in ("wait", "trigger") and not effect.sure and copy == 0):
                continue  # a step that may be left out: some programs leave it out
            steps.append(self._step(effect, path, copy))
        return tuple(steps)

    def _step(self, effect: Effect, path: int, copy: int) -> Step:
        under = tuple(self._counter(c, copy) for c in effect.last)
        if effect.kind in ("wait", "trigger"):
            return Step(effect.kind, under=under)
        value = self.value(effect.param)
        if effect.kind in ("arrive", "reset") and self.args[effect.param].kind != "scratch":
            return Step("write", self.scene.cells(value), (GARBAGE,) * CELLS, under=under)
        if effect.kind in ("arrive", "reset"):
            counter = self._counter(effect.param, copy)
            if effect.kind == "reset":
                own = (counter,) if effect.param in effect.guards else ()
                return Step("reset", counter=counter, under=(*under, *own))
            return Step("arrive", counter=counter, group=self._group(effect), under=under)
        needs = self._index(value)
        guarded = any(self.value(g) in needs for g in effect.guards)
        if needs and not guarded and any(seq < 0 for seq, _ in self.scene.rows[self.step]):
            return Step("fault", under=under)
        if value in self.scene.rings:
            return self._cache_step(effect, value, path, copy, under)
        cells = self._share(effect, value, path, copy)
        return Step(effect.kind, cells, (self._token(effect, value),) * len(cells), under=under)

    def _token(self, effect: Effect, value: str) -> Token:
        """What a value's cells hold; one that last arrivers read and write again holds something new each time."""
        plain, depth = self.scene.token(value, self.step), len(effect.last)
        effects = [e for p in self.kernel.paths for e in p if e.param and self.value(e.param) == value]
        written = {len(e.last) for e in effects if e.kind == "write"}
        if len(written) < 2 or not any(e.kind == "read" for e in effects):
            return plain
        if effect.kind == "read":
            depth = max((d for d in written if d < depth), default=-1)
        return (plain, depth)

    def _index(self, value: str) -> set[str]:
        """What names the part of ``value`` that a row touches, and is -1 for a padded row."""
        if value in self.scene.rings or value.startswith("block_table"):
            return {"seqs"}
        ops = (self.scene.graph.ops[o] for o in self.launch.ops)
        return {op.inputs[1] for op in ops if op.kind == "expert_linear" and op.inputs[2] == value}

    def _counter(self, param: str, copy: int) -> Cell:
        """A group's counter: of the first level by group, of deeper levels one for all."""
        first_level = any(e.kind == "arrive" and e.param == param and not e.last for p in self.kernel.paths for e in p)
        return (self.value(param), copy % self.groups if first_level else 0)

    def _group(self, arrival: Effect) -> int:
        """How many arrive at one counter."""
        if arrival.last:
            return self.groups if len(arrival.last) == 1 else 1
        paths = sum(any(e.kind == "arrive" and e.param == arrival.param for e in p) for p in self.kernel.paths)
        return paths * self.copies // self.groups

    def _share(self, effect: Effect, value: str, path: int, copy: int) -> tuple[Cell, ...]:
        """Cells of a value that one program touches: all when reading, its own or its group's when writing."""
        *cells, padded = self.scene.cells(value)
        if effect.kind == "read" and (not effect.last or value not in self.written):
            return (*cells, padded)
        depths = self._alternatives(value)
        if effect.last:
            deeper = [d for d in depths if d > 0]
            if effect.kind == "write" and deeper:
                cells = cells[deeper.index(len(effect.last)) :: len(deeper)]
            groups = self.groups if len(effect.last) == 1 else 1
            mine = copy % groups
            return (*cells[mine::groups], *([padded] if mine == 0 and 0 not in depths else []))
        if 0 in depths:
            return (padded,)
        writers = [
            n
            for n, p in enumerate(self.kernel.paths)
            if any(e.kind == "write" and not e.last and self.value(e.param) == value for e in p)
        ]
        number, count = writers.index(path) * self.copies + copy, len(writers) * self.copies
        return (*cells[number % len(cells) :: min(count, len(cells))], *([padded] if number == 0 else []))

    def _alternatives(self, value: str) -> list[int]:
        """How far down the counters a value is written, where it is only written: each such place for some rows.

        With 0 among them the padded rows' share is written by whoever comes by.
        """
        effects = [
            e for p in self.kernel.paths for e in p if e.kind in ("read", "write") and self.value(e.param) == value
        ]
        depths = sorted({len(e.last) for e in effects})
        return depths if len(depths) > 1 and all(e.kind == "write" for e in effects) else []

    def _cache_step(self, effect: Effect, value: str, path: int, copy: int, under: tuple[Cell, ...]) -> Step:
        rows = [(seq, p) for seq, p in self.scene.rows[self.step] if seq >= 0]
        ring = self.scene.rings[value]
        if effect.kind == "write":
            mine = rows[copy :: self.copies] if not effect.last else rows
            cells = tuple(ring.cell(seq, p) for seq, p in mine)
            return Step("write", cells, tuple((ring.place, seq, p) for seq, p in mine), under=under)
        wanted: set[tuple[Cell, Token]] = {
            (ring.cell(seq, q), (ring.place, seq, q))
            for seq, p in rows
            for q in ring.seen(p)
            if not self._earlier(effect) or q < min(x for s, x in rows if s == seq)
        }
        if self._reads_old_version(ring) and not self._earlier(effect):
            wanted |= {(ring.cell(seq, p), None) for seq, p in rows}
        return Step("read", tuple(c for c, _ in wanted), tuple(t for _, t in wanted), under=under)

    def _earlier(self, effect: Effect) -> bool:
        """Whether a read leaves out what the step writes: as the rows' own positions and sequences tell."""
        return tuple(self.value(param) for param in effect.earlier) == ("positions", "seqs")

    def _reads_old_version(self, ring: Ring) -> bool:
        """Whether the launch's ops want the cache as it was before this step's rows were written."""
        graph = self.scene.graph
        wanted = {v for v in graph.reads(self.launch) if v in self.scene.rings and self._home(v) == ring.place}
        return bool(wanted) and all(v not in graph.producers for v in wanted)


def _segments(path: tuple[Effect, ...]) -> list[int]:
    """Steps before which holding a program back may matter: arrivals, first accesses after one or a wait, the end."""
    found, fresh, at = [], True, 0
    for effect in path:
        if effect.kind == "hint":
            continue
        if effect.kind in ("wait", "trigger", "arrive", "reset"):
            if effect.kind == "arrive":
                found.append(at)
            fresh = True
        elif fresh:
            found.append(at)
            fresh = False
        at += 1
    return [*found, at]
