"""The plan: what a bundle's runtime needs to know to run a partitioned graph. Pure data, JSON in and out.

Codegen makes it, the bundle stores it, the runtime executes it. It carries the graph, so that a backend without
kernels (the reference) can run from it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flintc.ir.graph import Graph
from flintc.ir.types import Dim, TensorType

#: Type of a kernel parameter, in Triton's signature words.
ParamType = Literal["*bf16", "*fp32", "*i32", "*u8", "i32"]

EffectKind = Literal["wait", "trigger", "read", "write", "hint", "arrive", "reset"]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a kernel entry, in signature order. ``aligned``: pointers are 16-byte aligned."""

    name: str
    type: ParamType
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class Effect:
    """One thing that a program of a kernel does to memory, or to the chain of dependent launches.

    kind: ``wait`` for the launches before, ``trigger`` the next one; ``read`` or ``write`` memory that ``param`` points
    into; ``hint`` at it (a prefetch: no value enters the program); ``arrive`` at a counter, or ``reset`` it to zero.
    last: counters at which this program must be the last arriver to get here, the first one met first.
    guards: pointer parameters whose contents decide whether, and for which rows, it is done.
    sure: False for a wait or trigger that may be left out or repeated (in a loop, under a condition).
    earlier: of a read of a cache that leaves out the positions which this step writes, the parameters whose contents
    tell these: the rows' positions, and their sequences.
    """

    kind: EffectKind
    param: str = ""
    last: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    sure: bool = True
    earlier: tuple[str, ...] = ()


#: What one program does, in program order; a loop's body stands once.
Path = tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One generated kernel entry, shared by every launch with the same structure.

    ``constants`` are bound at compile time; ``waits`` says that the kernel executes ``griddepcontrol.wait`` and
    must be launched with the programmatic-stream-serialization attribute. ``max_registers`` is the budget of registers
    per thread that the compiler schedules for (one step more on a target where it would spill); 0 leaves it to the
    compiler, which may then delay loads to save some.
    ``several`` names the kernel that runs in its place in steps of more than one row: the same arithmetic, hence the
    same bits, under another budget, with another way to hold vectors, with fewer loads ahead, or with its wait, loads
    and trigger in another order. ``apart``: no two programs of a launch are to share a multiprocessor, where there
    is one for each.
    """

    name: str
    source: str
    params: tuple[Param, ...]
    constants: Mapping[str, int | float | bool]
    num_warps: int
    num_stages: int
    waits: bool
    max_registers: int = 0
    paths: tuple[Path, ...] = ()
    several: str | None = None
    apart: bool = False


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel built for one target, with what a launcher and a report need to know.

    ``entry`` is the symbol in the cubin; ``params`` are the names of all its parameters in order: the kernel's own,
    then the pointers that the compiler appends, which a launcher passes as null. ``shared_bytes`` is the dynamic
    shared memory of a launch; ``registers`` are per thread; ``spill_stores`` and ``spill_loads`` are bytes per thread.
    """

    kernel: str
    target: str
    entry: str
    params: tuple[str, ...]
    num_warps: int
    shared_bytes: int
    registers: int
    spill_stores: int
    spill_loads: int
    cubin: bytes
    ptx: str

    @property
    def spills(self) -> int:
        """Bytes per thread that pass through spill stores and loads; anything but 0 is worth a warning."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True, slots=True)
class Arg:
    """What a launch passes for a parameter.

    ``value``: pointer to a graph value (its buffer, or weight, table, cache, input).
    ``part``: pointer to one component of a packed weight, as ``value#component`` (``codes``, ``scales``, ``scale``).
    ``scratch``: pointer to a scratch buffer. ``symbol``: an i32 run-time symbol (``B``, ``S``, ``T``, ...).
    """

    kind: Literal["value", "part", "scratch", "symbol"]
    ref: str


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch: a kernel, its grid (dimensions may hold symbols), its arguments in parameter order."""

    name: str
    kernel: str
    grid: tuple[Dim, Dim, Dim]
    args: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Device memory shared by activations whose lifetimes do not overlap; sized once symbols are known."""

    name: str
    types: tuple[TensorType, ...]

    def nbytes(self, env: Mapping[str, int]) -> int:
        """Bytes the buffer needs under ``env``: the most of its types, in whole 256-byte units."""
        return max(-(-t.nbytes(env) // 256) * 256 for t in self.types)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory a kernel needs besides values. Arrival counters are zeroed once, and left zero by every launch."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Sampler:
    """Launches that choose each row's next token on the device, after the step's: no part of it, counted apart.

    They read the logits, and write ``ids`` and ``positions`` of the rows' next step besides what ``memory`` holds:
    ``requests``, words that the caller writes ahead of the step (see :mod:`flintc.codegen.sampler`), ``tokens`` (-1
    where logits are not finite) and ``logprobs``. Their kernels do not wait, so that each runs by itself: after
    everything before it, and before everything after it. most: the largest top-k that they can serve.
    """

    launches: tuple[PlannedLaunch, ...]
    memory: Mapping[str, Scratch]
    most: int


RoutineKind = Literal["embed", "norm", "linear", "heads", "attention", "silu", "experts"]


@dataclass(frozen=True, slots=True)
class Routine:
    """Ops that the general path serves together: ``kind`` says how, ``kernels`` which kernels by what they are for."""

    name: str
    kind: RoutineKind
    ops: tuple[str, ...]
    kernels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class General:
    """How prompts run: routines over any number of rows of one sequence, in order, each op of the graph in one.

    Its kernels are launched one after the other, without dependent launch.
    """

    kernels: Mapping[str, Kernel]
    routines: tuple[Routine, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything needed to run one forward step.

    buffers: by name; ``placement`` maps each activation that lives in device memory to its buffer.
    sampler: its kernels are among ``kernels``, its launches not among ``launches``.
    general: None where prompts run as steps; its kernels are not among ``kernels``.
    """

    graph: Graph
    kernels: Mapping[str, Kernel]
    launches: tuple[PlannedLaunch, ...]
    buffers: Mapping[str, Buffer]
    placement: Mapping[str, str]
    scratch: Mapping[str, Scratch]
    sampler: Sampler | None = None
    general: General | None = None

    def kernel_for(self, launch: PlannedLaunch, rows: int) -> Kernel:
        """What runs ``launch`` in a step of ``rows`` rows."""
        kernel = self.kernels[launch.kernel]
        return self.kernels[kernel.several] if rows > 1 and kernel.several is not None else kernel

    @property
    def all_kernels(self) -> Mapping[str, Kernel]:
        """Kernels of the step and of the general path, by name."""
        return {**self.kernels, **(self.general.kernels if self.general is not None else {})}
