"""The checker: a plan either keeps every rule, or is refused naming launch, value, memory and rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flintc.errors import VerificationError
from flintc.ir.graph import Launch
from flintc.ir.plan import Plan
from flintc.safety.access import BoundLaunch, places
from flintc.safety.hazard import Hazard
from flintc.safety.launches import attribute, binding, counters, inside, padding, presence, sampling, waits
from flintc.safety.memory import capacity, content, rings
from flintc.safety.races import races

#: Hazards told in one message.
_TOLD = 3

Rule = Callable[[Plan, tuple[BoundLaunch, ...]], Iterator[Hazard]]

#: Rules that hold of the step as a whole.
_WHOLE: tuple[Rule, ...] = (content, capacity, rings)
#: Rules that hold of each launch by itself, in the step and after it.
_EACH = (attribute, waits, inside, counters)


def check_plan(plan: Plan) -> None:
    """Raise :class:`VerificationError` unless the launches of ``plan`` are proved free of races.

    The proof assumes no more than the order of launches, the waits that their kernels execute, and the effects that
    each kernel states (``Kernel.paths``); the caller may still be writing the step's inputs when the first launch
    starts.
    """
    found = find_hazards(plan)
    if found:
        count = "a hazard" if len(found) == 1 else f"{len(found)} hazards"
        told = "; ".join(str(h) for h in found[:_TOLD])
        more = "; ..." if len(found) > _TOLD else ""
        raise VerificationError(f"the plan of {plan.graph.name} has {count}: {told}{more}")


def find_hazards(plan: Plan) -> list[Hazard]:
    """Every broken rule, in steps of one row and of several, which may run on other kernels.

    Rules about memory are asked only where launches and arguments make sense.
    """
    found = list(presence(plan))
    if found:
        return found
    by_name, where = {launch.name: launch for launch in plan.graph.launches}, places(plan)
    one = tuple(BoundLaunch(p, plan.kernels[p.kernel], by_name[p.name], where) for p in plan.launches)
    several = tuple(_of_several_rows(plan, bound) for bound in one)
    chosen = plan.sampler.launches if plan.sampler is not None else ()
    after = tuple(BoundLaunch(p, plan.kernels[p.kernel], Launch(p.name, "sample", ()), where) for p in chosen)
    found = [*_of_launches(plan, one), *_of_sampler(plan, after), *_of_chain(plan, one, after)]
    others = tuple(y for x, y in zip(one, several, strict=True) if x is not y)
    if others:
        found += [h for h in (*_of_launches(plan, others), *_of_chain(plan, several, after)) if h not in found]
    return found


def _of_several_rows(plan: Plan, bound: BoundLaunch) -> BoundLaunch:
    """The launch in steps of several rows: itself, where it runs on the same kernel."""
    kernel = plan.kernel_for(bound.planned, rows=2)
    return bound if kernel is bound.kernel else replace(bound, kernel=kernel)


def _of_launches(plan: Plan, step: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """Broken rules of launches of the step, each by itself."""
    for launch in step:
        for rule in (*_EACH, binding, padding):
            yield from rule(plan, launch)


def _of_sampler(plan: Plan, after: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """The same of the launches after the step."""
    for launch in after:
        for rule in (*_EACH, sampling):
            yield from rule(plan, launch)


def _of_chain(plan: Plan, step: tuple[BoundLaunch, ...], after: tuple[BoundLaunch, ...]) -> Iterator[Hazard]:
    """Broken rules of launches one after the other."""
    yield from races(plan, (*step, *after))
    for whole in _WHOLE:
        yield from whole(plan, step)
