"""Ways to break a plan: each kind makes one small change somewhere in it, drawn at random.

Some mutants of a kind stay harmless; which ones are is for the abstract machine to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from flintc.ir.graph import Graph, Launch
from flintc.ir.plan import Arg, Effect, Path, Plan, PlannedLaunch
from flintc.ir.types import TensorType

Paths = tuple[Path, ...]


@dataclass(frozen=True)
class Mutant:
    """A changed plan, and the launches that the change concerns."""

    plan: Plan
    touched: tuple[int, ...]
    what: str


Kind = Callable[[Plan, Random], Mutant | None]


def _with_paths(plan: Plan, index: int, paths: Paths, what: str, waits: bool | None = None) -> Mutant:
    """One launch gets a kernel of its own with other effects."""
    planned = plan.launches[index]
    kernel = plan.kernels[planned.kernel]
    changed = replace(
        kernel, name=f"{kernel.name}__mutant", paths=paths, waits=kernel.waits if waits is None else waits
    )
    launches = _replaced(plan.launches, index, replace(planned, kernel=changed.name))
    return Mutant(
        replace(plan, kernels={**plan.kernels, changed.name: changed}, launches=launches),
        (index,),
        f"{planned.name}: {what}",
    )


def _replaced(items: Sequence[PlannedLaunch], index: int, item: PlannedLaunch) -> tuple[PlannedLaunch, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _paths(plan: Plan, index: int) -> Paths:
    return plan.kernels[plan.launches[index].kernel].paths


def _pick_effect(
    plan: Plan, random: Random, wanted: Callable[[Plan, int, Path, int], bool]
) -> tuple[int, int, int] | None:
    """(launch, path, place) of some effect that is ``wanted``."""
    order = random.sample(range(len(plan.launches)), len(plan.launches))
    for index in order:
        found = [
            (index, number, at)
            for number, path in enumerate(_paths(plan, index))
            for at in range(len(path))
            if wanted(plan, index, path, at)
        ]
        if found:
            return random.choice(found)
    return None


def _move(path: Path, at: int, to: int) -> Path:
    """The effect at ``at`` stands at ``to`` instead; the others keep their order."""
    rest = [*path[:at], *path[at + 1 :]]
    return (*rest[:to], path[at], *rest[to:])


def _edit(plan: Plan, found: tuple[int, int, int], path: Path, what: str) -> Mutant:
    index, number, _ = found
    paths = _paths(plan, index)
    return _with_paths(plan, index, (*paths[:number], path, *paths[number + 1 :]), what)


def _is(kind: str) -> Callable[[Plan, int, Path, int], bool]:
    return lambda plan, index, path, at: path[at].kind == kind


def _wait_at(path: Path) -> int:
    return next((i for i, e in enumerate(path) if e.kind == "wait"), -1)


# Waits and triggers.


def drop_wait(plan: Plan, random: Random) -> Mutant | None:
    """No path of one launch waits any more; the attribute stays."""
    found = _pick_effect(plan, random, _is("wait"))
    if found is None:
        return None
    paths = tuple(tuple(e for e in path if e.kind != "wait") for path in _paths(plan, found[0]))
    return _with_paths(plan, found[0], paths, "does not wait")


def drop_wait_on_a_path(plan: Plan, random: Random) -> Mutant | None:
    """One path does not wait, or not surely."""
    found = _pick_effect(plan, random, _is("wait"))
    if found is None:
        return None
    index, number, at = found
    path = _paths(plan, index)[number]
    if len(_paths(plan, index)) > 1 and random.random() < 0.5:
        return _edit(plan, found, (*path[:at], *path[at + 1 :]), "one path does not wait")
    return _edit(plan, found, (*path[:at], replace(path[at], sure=False), *path[at + 1 :]), "may not wait")


def duplicate_wait(plan: Plan, random: Random) -> Mutant | None:
    """A second wait further down."""
    found = _pick_effect(plan, random, _is("wait"))
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    at = random.randint(found[2] + 1, len(path))
    return _edit(plan, found, (*path[:at], path[found[2]], *path[at:]), "waits twice")


def lower_wait(plan: Plan, random: Random) -> Mutant | None:
    """The wait moves down past something that it held back."""
    found = _pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "wait" and at + 1 < len(path))
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    to = random.randint(found[2] + 1, len(path) - 1)
    return _edit(plan, found, _move(path, found[2], to), f"waits after {path[to].kind} {path[to].param}")


def raise_wait(plan: Plan, random: Random) -> Mutant | None:
    """The wait moves up, past a load or the trigger."""
    found = _pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "wait" and at > 0)
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    return _edit(plan, found, _move(path, found[2], random.randrange(found[2])), "waits earlier")


def attribute_alone(plan: Plan, random: Random) -> Mutant | None:
    """The attribute is given where the kernel does not wait."""
    candidates = [i for i in range(len(plan.launches)) if not plan.kernels[plan.launches[i].kernel].waits]
    if not candidates:
        return None
    index = random.choice(candidates)
    return _with_paths(plan, index, _paths(plan, index), "has the attribute", waits=True)


def drop_attribute(plan: Plan, random: Random) -> Mutant | None:
    """The attribute is taken from a kernel, with its wait or without."""
    candidates = [i for i in range(len(plan.launches)) if plan.kernels[plan.launches[i].kernel].waits]
    if not candidates:
        return None
    index, paths = random.choice(candidates), None
    if random.random() < 0.5:
        paths = tuple(tuple(e for e in path if e.kind != "wait") for path in _paths(plan, index))
    return _with_paths(plan, index, paths or _paths(plan, index), "lacks the attribute", waits=False)


def move_trigger(plan: Plan, random: Random) -> Mutant | None:
    """The trigger moves: above the wait in the first launch, anywhere in the others."""
    index = 0 if random.random() < 0.8 else random.randrange(len(plan.launches))
    paths = []
    for path in _paths(plan, index):
        rest = tuple(e for e in path if e.kind != "trigger")
        if len(rest) == len(path) and _wait_at(path) < 0:
            return None
        at = random.randint(0, max(0, _wait_at(rest))) if index == 0 else random.randint(0, len(rest))
        paths.append((*rest[:at], Effect("trigger"), *rest[at:]))
    return _with_paths(plan, index, tuple(paths), "triggers elsewhere")


# Loads and stores against the wait and the counters.


def hoist_load(plan: Plan, random: Random) -> Mutant | None:
    """A load below the wait moves above it."""
    found = _pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "read" and at > _wait_at(path) >= 0)
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    moved = replace(path[found[2]], last=())
    changed = (*path[: found[2]], moved, *path[found[2] + 1 :])
    return _edit(plan, found, _move(changed, found[2], _wait_at(path)), f"loads {moved.param} early")


def raise_store(plan: Plan, random: Random) -> Mutant | None:
    """A store moves above the wait."""
    found = _pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "write" and at > _wait_at(path) >= 0)
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    moved = replace(path[found[2]], last=())
    changed = (*path[: found[2]], moved, *path[found[2] + 1 :])
    return _edit(plan, found, _move(changed, found[2], _wait_at(path)), f"stores {moved.param} early")


def lower_store(plan: Plan, random: Random) -> Mutant | None:
    """A store moves below an arrival that should publish it."""

    def published(p: Plan, i: int, path: Path, at: int) -> bool:
        return path[at].kind == "write" and any(e.kind == "arrive" for e in path[at:])

    found = _pick_effect(plan, random, published)
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    arrivals = [i for i, e in enumerate(path) if e.kind == "arrive" and i > found[2]]
    return _edit(plan, found, _move(path, found[2], random.choice(arrivals)), f"stores {path[found[2]].param} late")


def raise_arrival(plan: Plan, random: Random) -> Mutant | None:
    """An arrival, and what its last arriver does at once, moves up."""
    found = _pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "arrive" and at > 1)
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    to = random.randrange(found[2])
    return _edit(plan, found, _move(_move(path, found[2], to), found[2] + 1, to + 1), "arrives early")


def everyone_is_last(plan: Plan, random: Random) -> Mutant | None:
    """Work of the last arriver is done by every program."""
    found = _pick_effect(plan, random, lambda p, i, path, at: bool(path[at].last))
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    one = random.random() < 0.5
    changed = tuple(
        replace(e, last=e.last[:-1]) if e.last and (i == found[2] or not one) else e for i, e in enumerate(path)
    )
    return _edit(plan, found, changed, "does a last arriver's work in every program")


def skip_reset(plan: Plan, random: Random) -> Mutant | None:
    """A counter is not put back."""
    found = _pick_effect(plan, random, _is("reset"))
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    return _edit(plan, found, (*path[: found[2]], *path[found[2] + 1 :]), f"leaves {path[found[2]].param} as it is")


def reset_by_all(plan: Plan, random: Random) -> Mutant | None:
    """A counter is put back by every program, after or before arriving."""
    found = _pick_effect(plan, random, _is("reset"))
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    reset = path[found[2]]
    freed = replace(reset, guards=tuple(g for g in reset.guards if g != reset.param))
    changed = (*path[: found[2]], freed, *path[found[2] + 1 :])
    if random.random() < 0.5:
        changed = _move(changed, found[2], found[2] - 1)
    return _edit(plan, found, changed, f"every program resets {reset.param}")


def share_counter(plan: Plan, random: Random) -> Mutant | None:
    """A counter is another one: of the same launch, or of another."""
    counters = [(i, k) for i, x in enumerate(plan.launches) for k, a in enumerate(x.args) if a.kind == "scratch"]
    if len(counters) < 2:
        return None
    index, at = random.choice(counters)
    near = [plan.launches[i].args[k].ref for i, k in counters if i == index and k != at]
    far = [plan.launches[i].args[k].ref for i, k in counters if i != index]
    ref = random.choice(near if near and random.random() < 0.7 else far or near)
    return _with_arg(plan, index, at, Arg("scratch", ref), f"counts at {ref}")


def count_in_a_value(plan: Plan, random: Random) -> Mutant | None:
    """A value's memory serves as a counter."""
    counters = [(i, k) for i, x in enumerate(plan.launches) for k, a in enumerate(x.args) if a.kind == "scratch"]
    values = [v for v in plan.placement if plan.graph.values[v].type.dtype == "i32"]
    if not counters or not values:
        return None
    index, at = random.choice(counters)
    return _with_arg(plan, index, at, Arg("value", random.choice(values)), "counts in a value")


# Padded rows, caches, rings.


def drop_guard(plan: Plan, random: Random) -> Mutant | None:
    """A page is touched for padded rows too."""

    def guarded(p: Plan, i: int, path: Path, at: int) -> bool:
        params = p.kernels[p.launches[i].kernel].params
        refs = {q.name: a.ref for q, a in zip(params, p.launches[i].args, strict=True)}
        value = p.graph.values.get(refs.get(path[at].param, ""))
        paged = value is not None and (value.kind == "cache" or value.name.startswith("block_table"))
        return paged and path[at].kind != "hint" and any(refs[g] == "seqs" for g in path[at].guards)

    found = _pick_effect(plan, random, guarded)
    if found is None:
        return None
    path = _paths(plan, found[0])[found[1]]
    changed = (*path[: found[2]], replace(path[found[2]], guards=()), *path[found[2] + 1 :])
    return _edit(plan, found, changed, f"touches {path[found[2]].param} for padded rows")


def small_ring(plan: Plan, random: Random) -> Mutant | None:
    """A window's slots are used again too early: its ring has fewer pages."""
    tables = [v for v in plan.graph.values.values() if v.name.startswith("block_table.w")]
    if not tables:
        return None
    table = random.choice(tables)
    ring = table.type.shape[1]
    assert isinstance(ring, int)
    if ring < 2:
        return None
    pages = random.randrange(1, ring)
    values = dict(plan.graph.values)
    values[table.name] = replace(table, type=TensorType("i32", (table.type.shape[0], pages)))
    touched = []
    for op in plan.graph.ops.values():
        if op.kind == "kv_write" and op.inputs[5] == table.name:
            for name in (op.inputs[2], op.outputs[0]):
                shape = values[name].type.shape
                values[name] = replace(values[name], type=TensorType("bf16", (f"{pages}*Q", *shape[1:])))
            touched.append(op.name)
    graph = replace(plan.graph, values=values)
    return Mutant(replace(plan, graph=graph), (), f"{table.name}: {pages} of {ring} pages")


def old_cache_version(plan: Plan, random: Random) -> Mutant | None:
    """An attention reads the cache as it was before this step's rows, or only says so."""
    readers = [op for op in plan.graph.ops.values() if op.kind == "attention_partial"]
    op = random.choice(readers)
    write = plan.graph.ops[plan.graph.producers[op.inputs[1]]]
    new, old = op.inputs[1], write.inputs[2]
    graph = plan.graph
    if random.random() < 0.5:
        graph = _with_op_inputs(graph, op.name, tuple(old if v == new else v for v in op.inputs))
    index = next(i for i, x in enumerate(plan.launches) if op.name in _graph_launch(graph, x.name).ops)
    args = tuple(replace(a, ref=old) if a.ref == new else a for a in plan.launches[index].args)
    launches = _replaced(plan.launches, index, replace(plan.launches[index], args=args))
    return Mutant(replace(plan, graph=graph, launches=launches), (index,), f"{op.name} reads {old}")


def other_cache(plan: Plan, random: Random) -> Mutant | None:
    """A launch uses another layer's cache."""
    found = [
        (i, k)
        for i, x in enumerate(plan.launches)
        for k, a in enumerate(x.args)
        if a.kind == "value" and plan.graph.values[a.ref].kind == "cache"
    ]
    index, at = random.choice(found)
    value = plan.graph.values[plan.launches[index].args[at].ref]
    like = [v.name for v in plan.graph.values.values() if v.type == value.type and v.layer != value.layer]
    if not like:
        return None
    ref = random.choice(like)
    return _with_arg(plan, index, at, Arg("value", ref), f"uses {ref} for {value.name}")


# Memory and dataflow.


def _with_arg(plan: Plan, index: int, at: int, arg: Arg, what: str) -> Mutant:
    planned = plan.launches[index]
    args = (*planned.args[:at], arg, *planned.args[at + 1 :])
    launches = _replaced(plan.launches, index, replace(planned, args=args))
    return Mutant(replace(plan, launches=launches), (index,), f"{planned.name}: {what}")


def _redirect(plan: Plan, random: Random, wanted: Callable[[Plan, str], bool], what: str) -> Mutant | None:
    """An argument becomes another value of the same type."""
    found = [(i, k) for i, x in enumerate(plan.launches) for k, a in enumerate(x.args) if a.kind == "value"]
    random.shuffle(found)
    for index, at in found:
        value = plan.launches[index].args[at].ref
        if not wanted(plan, value):
            continue
        like = [
            v.name
            for v in plan.graph.values.values()
            if v.type == plan.graph.values[value].type
            and v.name != value
            and (v.kind != "activation" or v.name in plan.placement)
        ]
        if like:
            ref = random.choice(like)
            return _with_arg(plan, index, at, Arg("value", ref), f"{what} {ref} for {value}")
    return None


def drop_edge(plan: Plan, random: Random) -> Mutant | None:
    """A launch reads, or writes, another value than its ops do."""
    return _redirect(plan, random, lambda p, value: p.graph.values[value].kind == "activation", "passes")


def alias_buffers(plan: Plan, random: Random) -> Mutant | None:
    """Two buffers become one."""
    if len(plan.buffers) < 2:
        return None
    a, b = random.sample(list(plan.buffers), 2)
    buffers = {k: v for k, v in plan.buffers.items() if k != b}
    buffers[a] = replace(plan.buffers[a], types=tuple(dict.fromkeys((*plan.buffers[a].types, *plan.buffers[b].types))))
    placement = {v: a if k == b else k for v, k in plan.placement.items()}
    return Mutant(replace(plan, buffers=buffers, placement=placement), (), f"{b} is {a}")


def shorten_lifetime(plan: Plan, random: Random) -> Mutant | None:
    """A value's buffer is given to one that is made while it is still to be read."""
    lives = _lifetimes(plan)
    long = [v for v, (first, last) in lives.items() if last - first > 0]
    random.shuffle(long)
    for value in long:
        first, last = lives[value]
        later = [v for v, (made, _) in lives.items() if first < made <= last and v != value]
        if later:
            other = random.choice(later)
            return _placed(plan, other, plan.placement[value], lives[other][0])
    return None


def move_value(plan: Plan, random: Random) -> Mutant | None:
    """A value is placed in some other buffer."""
    if len(plan.buffers) < 2:
        return None
    value = random.choice(list(plan.placement))
    buffer = random.choice([b for b in plan.buffers if b != plan.placement[value]])
    return _placed(plan, value, buffer, _lifetimes(plan)[value][0])


def _placed(plan: Plan, value: str, buffer: str, index: int) -> Mutant:
    held, type = plan.buffers[buffer], plan.graph.values[value].type
    buffers = {**plan.buffers, buffer: replace(held, types=tuple(dict.fromkeys((*held.types, type))))}
    placed = replace(plan, buffers=buffers, placement={**plan.placement, value: buffer})
    return Mutant(placed, (index,), f"{value} is placed in {buffer}")


def _lifetimes(plan: Plan) -> dict[str, tuple[int, int]]:
    lives: dict[str, tuple[int, int]] = {}
    for index, planned in enumerate(plan.launches):
        for arg in planned.args:
            if arg.kind == "value" and arg.ref in plan.placement:
                lives[arg.ref] = (lives.get(arg.ref, (index, index))[0], index)
    return lives


def shrink_buffer(plan: Plan, random: Random) -> Mutant | None:
    """A buffer is laid out for one type less."""
    candidates = [b for b in plan.buffers.values() if len(b.types) > 1]
    if not candidates:
        return None
    buffer = random.choice(candidates)
    by_size = sorted(buffer.types, key=lambda t: t.nbytes({"B": 8, "S": 8}))
    gone = random.choice((by_size[-1], random.choice(buffer.types)))
    smaller = replace(buffer, types=tuple(t for t in buffer.types if t != gone))
    return Mutant(replace(plan, buffers={**plan.buffers, buffer.name: smaller}), (), f"{buffer.name} without {gone}")


# Launches.


def reorder(plan: Plan, random: Random) -> Mutant | None:
    """A launch moves, in the plan and in the graph alike."""
    index = random.randrange(len(plan.launches))
    to = min(len(plan.launches) - 1, max(0, index + random.choice((-3, -2, -1, 1, 2, 3))))
    if to == index:
        return None
    launches = list(plan.launches)
    launches.insert(to, launches.pop(index))
    by_name = {x.name: x for x in plan.graph.launches}
    graph = replace(plan.graph, launches=tuple(by_name[x.name] for x in launches))
    moved = replace(plan, launches=tuple(launches), graph=graph)
    return Mutant(moved, (min(index, to), max(index, to)), f"{plan.launches[index].name} moves by {to - index}")


def drop_launch(plan: Plan, random: Random) -> Mutant | None:
    """A launch is left out."""
    index = random.randrange(len(plan.launches))
    launches = (*plan.launches[:index], *plan.launches[index + 1 :])
    return Mutant(replace(plan, launches=launches), (index,), f"{plan.launches[index].name} is left out")


def repeat_launch(plan: Plan, random: Random) -> Mutant | None:
    """A launch is run again later."""
    index = random.randrange(len(plan.launches))
    to = random.randint(index + 1, len(plan.launches))
    launches = (*plan.launches[:to], plan.launches[index], *plan.launches[to:])
    return Mutant(replace(plan, launches=launches), (to,), f"{plan.launches[index].name} runs again")


def _graph_launch(graph: Graph, name: str) -> Launch:
    return next(x for x in graph.launches if x.name == name)


def _with_op_inputs(graph: Graph, name: str, inputs: tuple[str, ...]) -> Graph:
    return replace(graph, ops={**graph.ops, name: replace(graph.ops[name], inputs=inputs)})


def _named(*kinds: Kind) -> dict[str, Kind]:
    return {kind.__name__.replace("_", "-"): kind for kind in kinds}


CHAIN_KINDS = _named(
    drop_wait, drop_wait_on_a_path, duplicate_wait, lower_wait, raise_wait, attribute_alone, drop_attribute,
    move_trigger, hoist_load, raise_store, lower_store, raise_arrival, everyone_is_last, skip_reset, reset_by_all,
    share_counter, count_in_a_value,
)  # fmt: skip
MEMORY_KINDS = _named(
    drop_guard, small_ring, old_cache_version, other_cache, drop_edge, alias_buffers, shorten_lifetime, move_value,
    shrink_buffer, reorder, drop_launch, repeat_launch,
)  # fmt: skip
KINDS = {**CHAIN_KINDS, **MEMORY_KINDS}
