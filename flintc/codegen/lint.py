"""Holds compiled kernels against the effects that their sources state: what the checker proved is what will run.

Two looks, neither of which trusts the other: at the PTX, for every access, and at the machine code, for what stands
above the wait and for the wait itself. A compiler that moved a load above a wait is caught by one of them: by its
parameter, or, of a cache of which some loads may stand there, by how many do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flintc.codegen.ptx import Ptx, PtxAccess, parse_ptx
from flintc.codegen.sass import disassemble
from flintc.codegen.sass_flow import SassFlow, parse_sass
from flintc.errors import VerificationError
from flintc.ir.plan import CompiledKernel, Effect, Kernel

_STORES = ("write", "arrive", "reset")


def check_compiled(
    kernels: Mapping[str, Kernel], compiled: Iterable[CompiledKernel], *, machine_code: bool = True
) -> None:
    """Raise VerificationError unless every one of ``compiled`` does what its kernel states, and no more.

    ``machine_code``: look at the cubins too, at about half a second each; PTX alone takes milliseconds.
    """
    found = [
        f"{c.kernel} for {c.target}: {message}"
        for c in compiled
        for message in lint(kernels[c.kernel], c, machine_code=machine_code)
    ]
    if found:
        more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
        raise VerificationError(f"compiled code differs from what its kernel states: {found[0]}{more}")


def lint(kernel: Kernel, compiled: CompiledKernel, *, machine_code: bool = True) -> list[str]:
    """Every way in which ``compiled`` differs from what ``kernel`` states; one clear line each."""
    stated = _Stated(kernel)
    ptx = parse_ptx(kernel.name, compiled.ptx, compiled.params)
    found = [
        *_waits("PTX", kernel, len(ptx.waits), ptx.waited_at_end),
        *_accesses(stated, ptx),
        *_triggers("PTX", stated, [ptx.waited[i] for i in ptx.triggers]),
    ]
    if machine_code:
        types = {p.name: str(p.type) for p in kernel.params}
        params = [(name, types.get(name, "*u8")) for name in compiled.params]  # what the compiler appends are pointers
        sass = parse_sass(kernel.name, disassemble(compiled.cubin).text, params, compiled.target)
        found += [
            *_waits("machine code", kernel, len(sass.waits), sass.waited_at_end),
            *_machine_code(stated, sass, ptx),
        ]
    return found


class _Stated:
    """The effects of a kernel as sets of (kind, parameter)."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        above = [e for path in kernel.paths for e in _above(path)]
        self.above = {(e.kind, e.param) for e in above}
        self.all = {(e.kind, e.param) for path in kernel.paths for e in path}
        self.earlier = {e.param for e in above if e.earlier}
        self.counters = {e.param for path in kernel.paths for e in path if e.kind == "arrive"}

    def kind(self, access: PtxAccess) -> tuple[str, str]:
        """A compiled access in the words of effects: a store to a counter is its reset."""
        reset = access.kind == "write" and access.param in self.counters
        return ("reset" if reset else access.kind, access.param)


def _above(path: tuple[Effect, ...]) -> Iterator[Effect]:
    for effect in path:
        if effect.kind == "wait":
            return
        yield effect


def _waits(where: str, kernel: Kernel, waits: int, at_end: frozenset[int]) -> Iterator[str]:
    """The wait is executed once on every path if the launch has the attribute, and is not there if it has not."""
    if not kernel.waits:
        if waits:
            yield f"its {where} waits, but it is launched without the attribute"
        return
    if at_end != {1}:
        how = {0: "not at all", 1: "once", 2: "more than once"}
        times = " or ".join(how[n] for n in sorted(at_end)) or "without end"
        yield f"on its paths through the {where} it waits {times}, not exactly once"


def _accesses(stated: _Stated, ptx: Ptx) -> Iterator[str]:
    """Every access of the PTX is stated, above the wait if it may come there, and every store stated is there."""
    seen: set[tuple[tuple[str, str], bool]] = set()
    for access in ptx.accesses:
        above = stated.kernel.waits and 0 in ptx.waited[access.index]
        effect = stated.kind(access)
        if (effect, above) in seen:
            continue
        seen.add((effect, above))
        does = f"{effect[0]} through {effect[1]}"
        if above and effect[0] in _STORES:
            yield f"its PTX has a {does} above the wait"
        elif effect not in (stated.above if above else stated.all):
            where = "above" if above else "below"
            yield f"its PTX has a {does} {where} the wait, which its source does not state there"
        if access.nc and not above and stated.kernel.waits:
            yield f"its PTX loads through {access.param} below the wait past the coherent caches"
    present = {stated.kind(access) for access in ptx.accesses}
    for kind, param in sorted(stated.all - present):
        if kind in _STORES:
            yield f"its PTX lacks the {kind} through {param} that its source states"


def _triggers(where: str, stated: _Stated, waited: Sequence[frozenset[int]]) -> Iterator[str]:
    """The next launch is let go where stated, never earlier; ``waited``: per trigger, how often before it."""
    trigger = ("trigger", "")
    if trigger in stated.all and not waited:
        yield f"its {where} lost the trigger"
    if trigger not in stated.above and any(0 in counts for counts in waited):
        yield f"its {where} lets the next launch start above the wait, its source does not"


def _machine_code(stated: _Stated, sass: SassFlow, ptx: Ptx) -> Iterator[str]:
    """Nothing above the wait that is not stated there; of a cache, no more loads than in the PTX."""
    yield from _triggers("machine code", stated, [sass.waited[i] for i in sass.triggers])
    if not stated.kernel.waits:
        return
    for opcode in sass.stores_above():
        yield f"its machine code has a {opcode} above the wait"
    early = Counter(a.param for a in ptx.accesses if a.kind == "read" and 0 in ptx.waited[a.index])
    for param, count in sorted(sass.loads_above().items()):
        if ("read", param) not in stated.above:
            yield f"its machine code loads through {param} above the wait, its source does not"
        elif param in stated.earlier and count > early[param]:
            yield f"its machine code has {count} loads through {param} above the wait, its PTX {early[param]}"
