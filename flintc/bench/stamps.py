"""Kernels that note when each of their programs starts, has waited, and ends: where a step's time goes, hop by hop.

The profiler counts the wait of a launch that starts early as its time. A stamped plan says what the chain says: one
launch's programs are let go when the last program of the launch before has ended.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from flintc.errors import VerificationError
from flintc.ir.plan import Arg, Kernel, Param, Plan, PlannedLaunch, Scratch
from flintc.ir.types import TensorType

#: Numbers of a program: the low words of the nanoseconds at which it starts, has waited and ends; its multiprocessor.
START, WAITED, END, PLACE = range(4)
COLUMNS = 4

_PARAM = "stamps_ptr"
_STARTED, _WAITED = "started = time_of_program()", "waited = time_of_program()"
_END = f"stamp_program({_PARAM}, started, waited)"

_HELPER = f'''\
@triton.jit
def time_of_program():
    """The low word of the nanoseconds."""
    return tl.extra.cuda.globaltimer().to(tl.int32)


@triton.jit
def stamp_program(stamps_ptr, started, waited):
    """Note the times of this program, and its multiprocessor. Only here, since a store is in the way of loads."""
    tl.debug_barrier()
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    first = stamps_ptr + {COLUMNS} * program
    tl.store(first + {END}, time_of_program())
    tl.store(first + {START}, started)
    tl.store(first + {WAITED}, waited)
    tl.store(first + {PLACE}, tl.extra.cuda.smid())


'''


def stamped(plan: Plan) -> Plan:
    """The step of ``plan`` with stamped kernels: the same arithmetic, and four numbers a program in memory of its own.

    It is not to be checked for safety: its kernels write memory that its graph does not know. It has no sampler and no
    general path. VerificationError where a kernel's text cannot be stamped.
    """
    called = {plan.kernel_for(launch, rows).name for launch in plan.launches for rows in (1, 2)}
    scratch = {
        stamps_of(launch.name): Scratch(stamps_of(launch.name), TensorType("i32", (*reversed(launch.grid), COLUMNS)))
        for launch in plan.launches
    }
    return replace(
        plan,
        kernels={name: _stamped_kernel(kernel) for name, kernel in plan.kernels.items() if name in called},
        launches=tuple(_stamped_launch(launch) for launch in plan.launches),
        scratch={**plan.scratch, **scratch},
        sampler=None,
        general=None,
    )


def stamps_of(launch: str) -> str:
    """Name of the memory that holds a launch's stamps: i32[z, y, x, COLUMNS], x, y, z being its grid."""
    return f"{launch}.stamps"


def _stamped_launch(launch: PlannedLaunch) -> PlannedLaunch:
    return replace(launch, args=(Arg("scratch", stamps_of(launch.name)), *launch.args))


def _stamped_kernel(kernel: Kernel) -> Kernel:
    params = (Param(_PARAM, "*i32"), *kernel.params)
    return replace(kernel, source=stamped_source(kernel.source, kernel.name, kernel.waits), params=params)


def stamped_source(source: str, entry: str, waits: bool) -> str:
    """``source`` whose function ``entry`` takes ``stamps_ptr`` first and notes its times there.

    Where it does not wait, it has waited when it starts. VerificationError where it waits somewhere else than in
    ``entry`` itself, or has several statements or parameters on a line.
    """
    (function,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == entry)
    lines = (source.rstrip("\n") + "\n").splitlines(keepends=True)
    documented = ast.get_docstring(function) is not None
    assert function.end_lineno is not None
    nodes = list(ast.walk(function))
    waiting = [n for n in nodes if isinstance(n, ast.Expr) and ast.unparse(n) == "wait_for_producers()"]
    if waits and not waiting:
        raise VerificationError(f"kernel {entry} waits in a function that it calls: its wait cannot be stamped")
    # Lines that something goes ahead of, counted from 0; what is listed first comes first where they are the same.
    inserted = [
        (function.decorator_list[0].lineno - 1, _HELPER),
        (function.args.args[0].lineno - 1, f"    {_PARAM},\n"),
        (function.body[documented].lineno - 1, _line(_STARTED) + ("" if waits else _line(_WAITED))),
        *((n.lineno, _line(_WAITED, n.col_offset)) for n in waiting),
        *((n.lineno - 1, _line(_END, n.col_offset)) for n in nodes if isinstance(n, ast.Return)),
    ]
    if not isinstance(function.body[-1], ast.Return):
        inserted.append((function.end_lineno, _line(_END)))
    inserted.sort(key=lambda each: each[0])
    for at, text in reversed(inserted):
        lines.insert(at, text)
    made = "".join(lines)
    try:
        ast.parse(made)
    except SyntaxError as error:
        raise VerificationError(f"kernel {entry} has several statements, or parameters, on a line: {error}") from error
    return made


def _line(text: str, indent: int = 4) -> str:
    return f"{' ' * indent}{text}\n"
