"""A small plan and made-up machine code, for the tests of bundles."""

from __future__ import annotations

from flintc.bundle import Bundle, Origin, build_bundle
from flintc.ir.graph import Graph, Launch, Op, Value
from flintc.ir.plan import Arg, Buffer, CompiledKernel, Effect, Kernel, Param, Plan, PlannedLaunch, Scratch
from flintc.ir.types import TensorType

ROW = TensorType("bf16", ("B", 8))
SUM = TensorType("f32", ("B", 8))
ORIGIN = Origin("tiny", "ab" * 32, "bf16", ("residual-norm", "dependent-launch"), (1, 2))


def make_plan(source: str = "raise SystemExit('a bundle executed its own source')\n") -> Plan:
    """One residual add: one launch, one kernel whose source must never run."""
    graph = Graph(
        name="tiny",
        values={
            "x": Value("x", ROW, "input"),
            "r": Value("r", ROW, "input"),
            "s": Value("s", SUM, "activation"),
            "y": Value("y", ROW, "activation"),
        },
        ops={"add": Op("add", "add", ("x", "r"), ("s", "y"))},
        launches=(Launch("add", "add", ("add",)),),
        outputs=("s", "y"),
    )
    kernel = Kernel(
        "add",
        source,
        (*(Param(f"{n}_ptr", "*bf16") for n in "xrsy"), Param("n", "i32")),
        {"WIDTH": 8},
        4,
        1,
        True,
        paths=(
            (Effect("wait"), *(Effect("read", f"{n}_ptr") for n in "xr"), *(Effect("write", f"{n}_ptr") for n in "sy")),
        ),
    )
    launch = PlannedLaunch("add", "add", ("B", 1, 1), (*(Arg("value", n) for n in "xrsy"), Arg("symbol", "B")))
    buffers = {"b0": Buffer("b0", (SUM,)), "b1": Buffer("b1", (ROW,))}
    scratch = {"counters": Scratch("counters", TensorType("i32", (4,)))}
    return Plan(graph, {"add": kernel}, (launch,), buffers, {"s": "b0", "y": "b1"}, scratch)


def make_compiled(
    plan: Plan, targets: tuple[str, ...] = ("sm_90", "sm_100"), spill: int = 0
) -> dict[tuple[str, str], CompiledKernel]:
    """Made-up machine code for every kernel of ``plan``."""
    return {
        (name, target): CompiledKernel(
            kernel=name,
            target=target,
            entry=name,
            params=(*(p.name for p in kernel.params), "global_scratch", "profile_scratch"),
            num_warps=kernel.num_warps,
            shared_bytes=1024,
            registers=40,
            spill_stores=spill,
            spill_loads=2 * spill,
            cubin=b"\x7fELF" + f"{name} for {target}".encode() + bytes(range(256)),
            ptx=f".target {target}a // {name}\n",
        )
        for name, kernel in plan.kernels.items()
        for target in targets
    }


def make_bundle(targets: tuple[str, ...] = ("sm_90", "sm_100"), spill: int = 0) -> Bundle:
    """A bundle in memory."""
    plan = make_plan()
    return build_bundle(plan, make_compiled(plan, targets, spill), ORIGIN)
