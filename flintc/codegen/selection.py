"""From a launch to a kernel: which template, which parameters, which constants, which grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flintc.codegen.schedule import schedule_of
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.plan import Arg, Kernel, Param, ParamType, Scratch
from flintc.ir.types import Dim, DType, TensorType

POINTERS: dict[DType, ParamType] = {"bf16": "*bf16", "f32": "*fp32", "i32": "*i32"}

#: Rows of a step that kernels can serve. Those of one row and of several do the same arithmetic in the same order, so
#: that a row's bits never depend on the batch.
MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """A kernel for a launch, and what this launch passes to it.

    ``blocks`` chooses template blocks (strings and booleans only); sizes go to ``constants``, which become constexpr
    parameters of the entry. Launches with equal template, blocks, parameters and constants share the entry.
    """

    name: str
    template: str
    doc: str
    blocks: Mapping[str, str | bool]
    params: tuple[Param, ...]
    args: tuple[Arg, ...]
    constants: Mapping[str, int | float | bool]
    grid: tuple[Dim, Dim, Dim]
    scratch: tuple[Scratch, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int = 0
    #: See :class:`Kernel`.
    apart: bool = False
    #: Register budget in steps of several rows, where it is another.
    several_registers: int | None = None
    #: Template blocks that are others in steps of one row: the same arithmetic in the same order.
    one_row: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def of_one_row(self) -> Selection:
        """What serves steps of one row."""
        return replace(self, blocks={**self.blocks, **self.one_row})

    @property
    def structure(self) -> tuple[object, ...]:
        """What makes a kernel the same as another one's; hashable."""
        return (
            self.name, self.template, tuple(self.blocks.items()), self.params, tuple(self.constants.items()),
            self.num_warps, self.num_stages, self.max_registers, self.apart, self.several_registers,
        )  # fmt: skip


@dataclass
class KernelTable:
    """Kernels by name: those of equal structure are one, a name that another structure has taken gets a number."""

    by_name: dict[str, Kernel] = field(default_factory=dict)
    _names: dict[object, str] = field(default_factory=dict)

    def keep(self, structure: object, name: str, make: Callable[[str], Kernel]) -> str:
        """Name of the kernel of this ``structure``, made by ``make`` of its name where it is the first."""
        if structure not in self._names:
            own, number = name, 1
            while own in self.by_name:
                number += 1
                own = f"{name}_{number}"
            self._names[structure] = own
            self.by_name[own] = make(own)
        return self._names[structure]


@dataclass
class Signature:
    """Collects a kernel's parameters and a launch's arguments side by side."""

    graph: Graph
    launch: Launch
    params: list[Param] = field(default_factory=list)
    args: list[Arg] = field(default_factory=list)
    scratches: list[Scratch] = field(default_factory=list)

    def value(self, name: str, value: str) -> None:
        """Pass ``value`` as ``{name}_ptr``; an NVFP4 weight as ``_codes_ptr``, ``_scales_ptr`` and ``_scale_ptr``."""
        dtype = self.graph.values[value].type.dtype
        if dtype == "nvfp4":
            for part, kind in (("codes", "*u8"), ("scales", "*u8"), ("scale", "*fp32")):
                self.params.append(Param(f"{name}_{part}_ptr", kind))  # type: ignore[arg-type]
                self.args.append(Arg("part", f"{value}#{part}"))
            return
        self.params.append(Param(f"{name}_ptr", POINTERS[dtype]))
        self.args.append(Arg("value", value))

    def symbol(self, name: str, symbol: str) -> None:
        """Pass a run-time symbol (``B`` rows, ``T`` block-table columns, ...) as an i32."""
        self.params.append(Param(name, "i32", aligned=False))
        self.args.append(Arg("symbol", symbol))

    def extent(self, name: str, extent: Dim, constants: dict[str, int | float | bool]) -> str:
        """Pass a symbol as the parameter ``name``, a number as the constant ``NAME``; returns which of the two."""
        if isinstance(extent, str):
            self.symbol(name, extent)
            return name
        constants[name.upper()] = extent
        return name.upper()

    def counters(self, name: str, count: Dim) -> None:
        """Pass ``count`` zeroed arrival counters of this launch as ``{name}_ptr``."""
        self.memory(name, f"{self.launch.name}.{name}", TensorType("i32", (count,)))

    def memory(self, name: str, scratch: str, type: TensorType) -> None:
        """Pass memory called ``scratch``, no value of the graph, as ``{name}_ptr``."""
        self.scratches.append(Scratch(scratch, type))
        self.params.append(Param(f"{name}_ptr", POINTERS[type.dtype]))
        self.args.append(Arg("scratch", scratch))

    def select(
        self,
        name: str,
        template: str,
        doc: str,
        *,
        grid: tuple[Dim, Dim, Dim],
        constants: Mapping[str, int | float | bool],
        blocks: Mapping[str, str | bool] | None = None,
        num_warps: int = 4,
        num_stages: int = 1,
        max_registers: int = 0,
        apart: bool = False,
        several_registers: int | None = None,
        one_row: Mapping[str, str | bool] | None = None,
    ) -> Selection:
        """The finished selection; a schedule's budget for several rows goes before the one given."""
        scheduled = schedule_of(name).several
        return Selection(
            name, template, doc, blocks or {}, tuple(self.params), tuple(self.args), constants, grid,
            tuple(self.scratches), num_warps, num_stages, max_registers, apart,
            several_registers if scheduled is None else scheduled, one_row or {},
        )  # fmt: skip


Selector = Callable[[Graph, Launch], Selection]


def only_op(graph: Graph, launch: Launch, kind: str) -> Op:
    """The one op of ``kind`` in ``launch``."""
    (op,) = (graph.ops[o] for o in launch.ops if graph.ops[o].kind == kind)
    return op


def ops_of(graph: Graph, launch: Launch, kind: str) -> tuple[Op, ...]:
    """The ops of ``kind`` in ``launch``, in order."""
    return tuple(graph.ops[o] for o in launch.ops if graph.ops[o].kind == kind)


def columns(graph: Graph, value: str) -> int:
    """Last dimension of ``value``, which no kernel takes as a run-time symbol."""
    last = graph.values[value].type.shape[-1]
    assert isinstance(last, int)
    return last


def power_of_two(n: int) -> int:
    """Smallest power of two >= n: what ``tl.arange`` can span."""
    return 1 << (n - 1).bit_length()
