"""Mutants of buffers, lifetimes, caches, rings, dataflow and the order of launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from mutation import Mutant, edited, named, paths_of, pick_effect, replaced, with_arg

from flintc.ir.graph import Graph, Launch
from flintc.ir.plan import Arg, Path, Plan
from flintc.ir.types import TensorType


def drop_guard(plan: Plan, random: Random) -> Mutant | None:
    """A page, or an expert, is looked up for padded rows too."""

    def guarded(p: Plan, i: int, path: Path, at: int) -> bool:
        params = p.kernels[p.launches[i].kernel].params
        refs = {q.name: a.ref.partition("#")[0] for q, a in zip(params, p.launches[i].args, strict=True)}
        value = p.graph.values.get(refs.get(path[at].param, ""))
        if value is None or path[at].kind == "hint":
            return False
        ops = p.graph.ops.values()
        experts = {op.inputs[2] for op in ops if op.kind == "expert_linear"}
        return value.kind == "cache" or value.name.startswith("block_table") or value.name in experts

    found = pick_effect(plan, random, guarded)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    changed = (*path[: found[2]], replace(path[found[2]], guards=()), *path[found[2] + 1 :])
    return edited(plan, found, changed, f"touches {path[found[2]].param} for padded rows")


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
    for op in plan.graph.ops.values():
        if op.kind == "kv_write" and op.inputs[5] == table.name:
            for name in (op.inputs[2], op.outputs[0]):
                shape = values[name].type.shape
                values[name] = replace(values[name], type=TensorType("bf16", (f"{pages}*Q", *shape[1:])))
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
    launches = replaced(plan.launches, index, replace(plan.launches[index], args=args))
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
    return with_arg(plan, index, at, Arg("value", ref), f"uses {ref} for {value.name}")


def drop_edge(plan: Plan, random: Random) -> Mutant | None:
    """A launch reads, or writes, another value than its ops do."""
    return _redirect(plan, random, lambda p, value: p.graph.values[value].kind == "activation", "passes")


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
            return with_arg(plan, index, at, Arg("value", ref), f"{what} {ref} for {value}")
    return None


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
    by_size = sorted(buffer.types, key=lambda t: t.nbytes({"B": 8}))
    gone = random.choice((by_size[-1], random.choice(buffer.types)))
    smaller = replace(buffer, types=tuple(t for t in buffer.types if t != gone))
    return Mutant(replace(plan, buffers={**plan.buffers, buffer.name: smaller}), (), f"{buffer.name} without {gone}")


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


MEMORY_KINDS = named(
    drop_guard, small_ring, old_cache_version, other_cache, drop_edge, alias_buffers, shorten_lifetime, move_value,
    shrink_buffer, reorder, drop_launch, repeat_launch,
)  # fmt: skip
