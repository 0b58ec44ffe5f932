"""What each launch of a plan touches: its kernel's effects, bound to values and to the memory they live in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from flintc.ir.graph import Launch
from flintc.ir.plan import Arg, Effect, Kernel, Path, Plan, PlannedLaunch

#: Effects that change memory, and those that see what it holds.
WRITES = frozenset({"write", "arrive", "reset"})
TOUCHES = frozenset({"read", "write", "arrive", "reset"})


@dataclass(frozen=True, slots=True)
class Access:
    """One effect of a launch on memory. ``value`` is a graph value or a counter, ``place`` the memory it lives in."""

    effect: Effect
    value: str
    place: str
    #: Which path of the kernel, and where on it.
    path: int
    at: int
    #: Whether it may come before the wait.
    above: bool

    @property
    def writes(self) -> bool:
        """Whether it changes memory."""
        return self.effect.kind in WRITES


@dataclass(frozen=True)
class BoundLaunch:
    """A launch of a plan together with its kernel and its launch of the graph."""

    planned: PlannedLaunch
    kernel: Kernel
    launch: Launch
    places: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the launch."""
        return self.planned.name

    @cached_property
    def args(self) -> Mapping[str, Arg]:
        """Arguments by parameter name."""
        return {p.name: a for p, a in zip(self.kernel.params, self.planned.args, strict=True)}

    def value(self, param: str) -> str:
        """What ``param`` points to: a value's name, or a counter's."""
        arg = self.args[param]
        return arg.ref.partition("#")[0] if arg.kind == "part" else arg.ref

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """Everything it reads or writes, hints apart."""
        return tuple(
            Access(effect, value, self.places.get(value, value), number, at, at < first_wait(path))
            for number, path in enumerate(self.kernel.paths)
            for at, effect in enumerate(path)
            if effect.kind in TOUCHES
            for value in (self.value(effect.param),)
        )


def first_wait(path: Path) -> int:
    """Where a path surely waits first; its length if it never does."""
    return next((i for i, effect in enumerate(path) if effect.kind == "wait" and effect.sure), len(path))


def places(plan: Plan) -> dict[str, str]:
    """Memory of each value that shares it with others: activations by buffer, cache versions by their first."""
    return {**plan.placement, **plan.graph.first_versions}
