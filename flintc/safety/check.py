"""The checker: a plan either keeps every rule, or is refused naming launch, value, memory and rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flintc.errors import VerificationError
from flintc.ir.graph import Launch
from flintc.ir.plan import Kernel, Plan
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
    one, several = (tuple(plan.kernel_for(p, rows) for p in plan.launches) for rows in (1, 2))
    found = _hazards_of(plan, one)
    if several != one:
        found += [hazard for hazard in _hazards_of(plan, several) if hazard not in found]
    return found


def _hazards_of(plan: Plan, kernels: Sequence[Kernel]) -> list[Hazard]:
    """Every broken rule where the launches of the step run these ``kernels``."""
    found: list[Hazard] = []
    by_name = {launch.name: launch for launch in plan.graph.launches}
    where = places(plan)
    step = tuple(BoundLaunch(p, k, by_name[p.name], where) for p, k in zip(plan.launches, kernels, strict=True))
    chosen = plan.sampler.launches if plan.sampler is not None else ()
    after = tuple(BoundLaunch(p, plan.kernels[p.kernel], Launch(p.name, "sample", ()), where) for p in chosen)
    for launch in (*step, *after):
        for rule in _EACH:
            found.extend(rule(plan, launch))
    for launch in step:
        found += [*binding(plan, launch), *padding(plan, launch)]
    for launch in after:
        found.extend(sampling(plan, launch))
    found.extend(races(plan, (*step, *after)))
    for whole in _WHOLE:
        found.extend(whole(plan, step))
    return found
