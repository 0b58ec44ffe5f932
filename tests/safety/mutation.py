"""Ways to break a plan: each kind makes one small change somewhere in it, drawn at random.

Some mutants of a kind stay harmless; which ones are is for the abstract machine to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from flintc.ir.plan import Arg, Path, Plan, PlannedLaunch

Paths = tuple[Path, ...]


@dataclass(frozen=True)
class Mutant:
    """A changed plan, and the launches that the change concerns."""

    plan: Plan
    touched: tuple[int, ...]
    what: str


Kind = Callable[[Plan, Random], Mutant | None]


def with_paths(plan: Plan, index: int, paths: Paths, what: str, waits: bool | None = None) -> Mutant:
    """One launch gets a kernel of its own with other effects."""
    planned = plan.launches[index]
    kernel = plan.kernels[planned.kernel]
    changed = replace(
        kernel, name=f"{kernel.name}__mutant", paths=paths, waits=kernel.waits if waits is None else waits
    )
    launches = replaced(plan.launches, index, replace(planned, kernel=changed.name))
    return Mutant(
        replace(plan, kernels={**plan.kernels, changed.name: changed}, launches=launches),
        (index,),
        f"{planned.name}: {what}",
    )


def replaced(items: Sequence[PlannedLaunch], index: int, item: PlannedLaunch) -> tuple[PlannedLaunch, ...]:
    return (*items[:index], item, *items[index + 1 :])


def paths_of(plan: Plan, index: int) -> Paths:
    return plan.kernels[plan.launches[index].kernel].paths


def pick_effect(
    plan: Plan, random: Random, wanted: Callable[[Plan, int, Path, int], bool]
) -> tuple[int, int, int] | None:
    """(launch, path, place) of some effect that is ``wanted``."""
    order = random.sample(range(len(plan.launches)), len(plan.launches))
    for index in order:
        found = [
            (index, number, at)
            for number, path in enumerate(paths_of(plan, index))
            for at in range(len(path))
            if wanted(plan, index, path, at)
        ]
        if found:
            return random.choice(found)
    return None


def shifted(path: Path, at: int, to: int) -> Path:
    """The effect at ``at`` stands at ``to`` instead; the others keep their order."""
    rest = [*path[:at], *path[at + 1 :]]
    return (*rest[:to], path[at], *rest[to:])


def edited(plan: Plan, found: tuple[int, int, int], path: Path, what: str) -> Mutant:
    index, number, _ = found
    paths = paths_of(plan, index)
    return with_paths(plan, index, (*paths[:number], path, *paths[number + 1 :]), what)


def of_kind(kind: str) -> Callable[[Plan, int, Path, int], bool]:
    return lambda plan, index, path, at: path[at].kind == kind


def wait_at(path: Path) -> int:
    return next((i for i, e in enumerate(path) if e.kind == "wait"), -1)


def with_arg(plan: Plan, index: int, at: int, arg: Arg, what: str) -> Mutant:
    planned = plan.launches[index]
    args = (*planned.args[:at], arg, *planned.args[at + 1 :])
    launches = replaced(plan.launches, index, replace(planned, args=args))
    return Mutant(replace(plan, launches=launches), (index,), f"{planned.name}: {what}")


def named(*kinds: Kind) -> dict[str, Kind]:
    return {kind.__name__.replace("_", "-"): kind for kind in kinds}
