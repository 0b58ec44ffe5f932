"""From a partitioned graph to a plan: kernels shared by like launches, buffers shared by lifetime."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flintc.codegen.effects import effects_of
from flintc.codegen.families import SELECTORS
from flintc.codegen.render import render
from flintc.codegen.selection import KernelTable, Selection
from flintc.errors import VerificationError
from flintc.ir.graph import Graph, Launch
from flintc.ir.plan import Arg, Buffer, Kernel, Plan, PlannedLaunch, Scratch
from flintc.ir.types import TensorType


def plan(graph: Graph) -> Plan:
    """Plan one forward step of ``graph``; VerificationError if a launch has a role no template serves."""
    kernels = KernelTable()
    launches: list[PlannedLaunch] = []
    scratch: dict[str, Scratch] = {}
    passed: set[str] = set()
    for launch in graph.launches:
        kernel, selection = _keep(kernels, graph, launch)
        launches.append(PlannedLaunch(launch.name, kernel, selection.grid, selection.args))
        scratch.update((s.name, s) for s in selection.scratch)
        passed.update(a.ref for a in selection.args if a.kind == "value")
    buffers, placement = place(graph, launches, passed)
    return Plan(graph, kernels.by_name, tuple(launches), buffers, placement, scratch)


def select(graph: Graph, launch: Launch) -> Selection:
    """The kernel that serves ``launch``."""
    selector = SELECTORS.get(launch.role)
    if selector is None:
        raise VerificationError(f"launch {launch.name}: no template serves the role {launch.role}")
    return selector(graph, launch)


def _keep(kernels: KernelTable, graph: Graph, launch: Launch) -> tuple[str, Selection]:
    """Name of the kernel that serves ``launch``, and what made it.

    One for steps of several rows is kept with it, where another budget of registers, another way to hold vectors, fewer
    loads ahead or another order of its wait, loads and trigger serves those.
    """
    alone = replace(launch, dependent=launch.dependent and launch.dependent.of_one_row)
    found = select(graph, alone)
    selection, several = found.of_one_row, found if alone == launch else select(graph, launch)
    if several.several_registers is not None:
        several = replace(several, max_registers=several.several_registers)
    given = [(s.params, s.args, s.grid) for s in (selection, several)]
    assert given[0] == given[1], f"launch {launch.name}: its kernels for one row and for several take different things"
    one, more = _structure(selection, alone), _structure(several, launch)
    other = None
    if one != more:
        name = f"{selection.name}_several"
        other = kernels.keep((more, "several"), name, partial(_kernel, graph, launch, several, None))
    make = partial(_kernel, graph, alone, selection, other)
    return kernels.keep((one, other), selection.name, make), selection


def _structure(selection: Selection, launch: Launch) -> object:
    """What makes the kernel of a launch the same as that of another one; hashable."""
    return selection.structure, launch.dependent and launch.dependent.trigger


def _kernel(graph: Graph, launch: Launch, selection: Selection, several: str | None, name: str) -> Kernel:
    source = render(graph, launch, selection, name)
    return Kernel(
        name, source, selection.params, dict(selection.constants),
        selection.num_warps, selection.num_stages, launch.dependent is not None, selection.max_registers,
        effects_of(source, name, selection.params, selection.constants), several, selection.apart,
    )  # fmt: skip


def place(graph: Graph, launches: list[PlannedLaunch], passed: set[str]) -> tuple[dict[str, Buffer], dict[str, str]]:
    """Give every activation that some launch passes by pointer a buffer; values whose lifetimes overlap differ.

    A value lives from the launch that makes it to the last launch that is passed it. An output may not take the
    buffer of an input of the same launch, since its programs run in no order.
    """
    last_use: dict[str, int] = {}
    first_use: dict[str, int] = {}
    for i, launch in enumerate(launches):
        for name in _activations(graph, launch.args, passed):
            first_use.setdefault(name, i)
            last_use[name] = len(launches) if name in graph.outputs else i
    free: list[str] = []
    held: dict[str, list[TensorType]] = {}
    placement: dict[str, str] = {}
    for i, launch in enumerate(launches):
        names = _activations(graph, launch.args, passed)
        for name in (n for n in names if first_use[n] == i):
            want = graph.values[name].type
            fits = [b for b in free if want in held[b]] or [b for b in free if _alike(want, held[b][0])]
            buffer = fits[0] if fits else f"buffer{len(held)}"
            if fits:
                free.remove(buffer)
            held.setdefault(buffer, [])
            if want not in held[buffer]:
                held[buffer].append(want)
            placement[name] = buffer
        free += [placement[n] for n in names if last_use[n] == i]
    return {b: Buffer(b, tuple(types)) for b, types in held.items()}, placement


def _activations(graph: Graph, args: tuple[Arg, ...], passed: set[str]) -> list[str]:
    names = dict.fromkeys(a.ref for a in args if a.kind == "value" and a.ref in passed)
    return [n for n in names if graph.values[n].kind == "activation"]


def _alike(want: TensorType, held: TensorType) -> bool:
    """Whether two types may share a buffer: same dependence on run-time symbols, so that neither wastes a lot."""
    symbols = [
        {f for d in t.shape if isinstance(d, str) for f in d.split("*") if not f.isdigit()} for t in (want, held)
    ]
    return symbols[0] == symbols[1]
