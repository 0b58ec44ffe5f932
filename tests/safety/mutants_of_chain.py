"""Mutants of waits, triggers, loads, stores and counters."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mutation import Mutant, edited, named, of_kind, paths_of, pick_effect, shifted, wait_at, with_arg, with_paths

from flintc.ir.plan import Arg, Effect, Path, Plan


def drop_wait(plan: Plan, random: Random) -> Mutant | None:
    """No path of one launch waits any more; the attribute stays."""
    found = pick_effect(plan, random, of_kind("wait"))
    if found is None:
        return None
    paths = tuple(tuple(e for e in path if e.kind != "wait") for path in paths_of(plan, found[0]))
    return with_paths(plan, found[0], paths, "does not wait")


def drop_wait_on_a_path(plan: Plan, random: Random) -> Mutant | None:
    """One path does not wait, or not surely."""
    found = pick_effect(plan, random, of_kind("wait"))
    if found is None:
        return None
    index, number, at = found
    path = paths_of(plan, index)[number]
    if len(paths_of(plan, index)) > 1 and random.random() < 0.5:
        return edited(plan, found, (*path[:at], *path[at + 1 :]), "one path does not wait")
    return edited(plan, found, (*path[:at], replace(path[at], sure=False), *path[at + 1 :]), "may not wait")


def duplicate_wait(plan: Plan, random: Random) -> Mutant | None:
    """A second wait further down."""
    found = pick_effect(plan, random, of_kind("wait"))
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    at = random.randint(found[2] + 1, len(path))
    return edited(plan, found, (*path[:at], path[found[2]], *path[at:]), "waits twice")


def lower_wait(plan: Plan, random: Random) -> Mutant | None:
    """The wait moves down past something that it held back."""
    found = pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "wait" and at + 1 < len(path))
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    to = random.randint(found[2] + 1, len(path) - 1)
    return edited(plan, found, shifted(path, found[2], to), f"waits after {path[to].kind} {path[to].param}")


def raise_wait(plan: Plan, random: Random) -> Mutant | None:
    """The wait moves up, past a load or the trigger."""
    found = pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "wait" and at > 0)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    return edited(plan, found, shifted(path, found[2], random.randrange(found[2])), "waits earlier")


def attribute_alone(plan: Plan, random: Random) -> Mutant | None:
    """The attribute is given where the kernel does not wait."""
    candidates = [i for i in range(len(plan.launches)) if not plan.kernels[plan.launches[i].kernel].waits]
    if not candidates:
        return None
    index = random.choice(candidates)
    return with_paths(plan, index, paths_of(plan, index), "has the attribute", waits=True)


def drop_attribute(plan: Plan, random: Random) -> Mutant | None:
    """The attribute is taken from a kernel, with its wait or without."""
    candidates = [i for i in range(len(plan.launches)) if plan.kernels[plan.launches[i].kernel].waits]
    if not candidates:
        return None
    index, paths = random.choice(candidates), None
    if random.random() < 0.5:
        paths = tuple(tuple(e for e in path if e.kind != "wait") for path in paths_of(plan, index))
    return with_paths(plan, index, paths or paths_of(plan, index), "lacks the attribute", waits=False)


def move_trigger(plan: Plan, random: Random) -> Mutant | None:
    """The trigger moves: above the wait in the first launch, anywhere in the others."""
    index = 0 if random.random() < 0.8 else random.randrange(len(plan.launches))
    paths = []
    for path in paths_of(plan, index):
        rest = tuple(e for e in path if e.kind != "trigger")
        if len(rest) == len(path) and wait_at(path) < 0:
            return None
        at = random.randint(0, max(0, wait_at(rest))) if index == 0 else random.randint(0, len(rest))
        paths.append((*rest[:at], Effect("trigger"), *rest[at:]))
    return with_paths(plan, index, tuple(paths), "triggers elsewhere")


def hoist_load(plan: Plan, random: Random) -> Mutant | None:
    """A load below the wait moves above it."""
    found = pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "read" and at > wait_at(path) >= 0)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    moved = replace(path[found[2]], last=())
    changed = (*path[: found[2]], moved, *path[found[2] + 1 :])
    return edited(plan, found, shifted(changed, found[2], wait_at(path)), f"loads {moved.param} early")


def claim_earlier(plan: Plan, random: Random) -> Mutant | None:
    """A load below the wait stands above it too, where it is said to leave out what the step writes."""
    found = pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "read" and at > wait_at(path) >= 0)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    pointers = [p.name for p in plan.kernels[plan.launches[found[0]].kernel].params if p.type.startswith("*")]
    rows = [name for name in ("positions_ptr", "seqs_ptr") if name in pointers]
    told = tuple(rows) if len(rows) == 2 and random.random() < 0.7 else tuple(random.sample(pointers, 2))
    early = replace(path[found[2]], last=(), earlier=told)
    at = wait_at(path)
    return edited(plan, found, (*path[:at], early, *path[at:]), f"loads {early.param} early as {told} tell")


def raise_store(plan: Plan, random: Random) -> Mutant | None:
    """A store moves above the wait."""
    found = pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "write" and at > wait_at(path) >= 0)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    moved = replace(path[found[2]], last=())
    changed = (*path[: found[2]], moved, *path[found[2] + 1 :])
    return edited(plan, found, shifted(changed, found[2], wait_at(path)), f"stores {moved.param} early")


def lower_store(plan: Plan, random: Random) -> Mutant | None:
    """A store moves below an arrival that should publish it."""

    def published(p: Plan, i: int, path: Path, at: int) -> bool:
        return path[at].kind == "write" and any(e.kind == "arrive" for e in path[at:])

    found = pick_effect(plan, random, published)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    arrivals = [i for i, e in enumerate(path) if e.kind == "arrive" and i > found[2]]
    return edited(plan, found, shifted(path, found[2], random.choice(arrivals)), f"stores {path[found[2]].param} late")


def raise_arrival(plan: Plan, random: Random) -> Mutant | None:
    """An arrival, and what its last arriver does at once, moves up."""
    found = pick_effect(plan, random, lambda p, i, path, at: path[at].kind == "arrive" and at > 1)
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    to = random.randrange(found[2])
    return edited(plan, found, shifted(shifted(path, found[2], to), found[2] + 1, to + 1), "arrives early")


def everyone_is_last(plan: Plan, random: Random) -> Mutant | None:
    """Work of the last arriver is done by every program."""
    found = pick_effect(plan, random, lambda p, i, path, at: bool(path[at].last))
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    one = random.random() < 0.5
    changed = tuple(
        replace(e, last=e.last[:-1]) if e.last and (i == found[2] or not one) else e for i, e in enumerate(path)
    )
    return edited(plan, found, changed, "does a last arriver's work in every program")


def skip_reset(plan: Plan, random: Random) -> Mutant | None:
    """A counter is not put back."""
    found = pick_effect(plan, random, of_kind("reset"))
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    return edited(plan, found, (*path[: found[2]], *path[found[2] + 1 :]), f"leaves {path[found[2]].param} as it is")


def reset_by_all(plan: Plan, random: Random) -> Mutant | None:
    """A counter is put back by every program, after or before arriving."""
    found = pick_effect(plan, random, of_kind("reset"))
    if found is None:
        return None
    path = paths_of(plan, found[0])[found[1]]
    reset = path[found[2]]
    freed = replace(reset, guards=tuple(g for g in reset.guards if g != reset.param))
    changed = (*path[: found[2]], freed, *path[found[2] + 1 :])
    if random.random() < 0.5:
        changed = shifted(changed, found[2], found[2] - 1)
    return edited(plan, found, changed, f"every program resets {reset.param}")


def share_counter(plan: Plan, random: Random) -> Mutant | None:
    """A counter is another one: of the same launch, or of another."""
    counters = [(i, k) for i, x in enumerate(plan.launches) for k, a in enumerate(x.args) if a.kind == "scratch"]
    if len(counters) < 2:
        return None
    index, at = random.choice(counters)
    near = [plan.launches[i].args[k].ref for i, k in counters if i == index and k != at]
    far = [plan.launches[i].args[k].ref for i, k in counters if i != index]
    ref = random.choice(near if near and random.random() < 0.7 else far or near)
    return with_arg(plan, index, at, Arg("scratch", ref), f"counts at {ref}")


def count_in_a_value(plan: Plan, random: Random) -> Mutant | None:
    """A value's memory serves as a counter."""
    counters = [(i, k) for i, x in enumerate(plan.launches) for k, a in enumerate(x.args) if a.kind == "scratch"]
    values = [v for v in plan.placement if plan.graph.values[v].type.dtype == "i32"]
    if not counters or not values:
        return None
    index, at = random.choice(counters)
    return with_arg(plan, index, at, Arg("value", random.choice(values)), "counts in a value")


CHAIN_KINDS = named(
    drop_wait, drop_wait_on_a_path, duplicate_wait, lower_wait, raise_wait, attribute_alone, drop_attribute,
    move_trigger, hoist_load, claim_earlier, raise_store, lower_store, raise_arrival, everyone_is_last, skip_reset,
    reset_by_all, share_counter, count_in_a_value,
)  # fmt: skip
