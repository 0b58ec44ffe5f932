"""Graphs and plans as JSON data, losslessly, and back, strictly.

Writing keeps the order of values, ops and launches, so equal graphs give equal bytes. Reading trusts nothing:
a missing or unknown key, a wrong type, or a reference to something that is not there is a BundleError naming the
path inside the JSON. What ops mean to each other (types, crossings) is the verifier's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

from flintc.ir.cursor import Cursor
from flintc.ir.graph import Attr, Crossing, CrossingKind, Dependent, Graph, Launch, Op, Trigger, Value, ValueKind
from flintc.ir.ops import OPS
from flintc.ir.plan import (
    Arg,
    Buffer,
    Effect,
    EffectKind,
    General,
    Kernel,
    Param,
    ParamType,
    Plan,
    PlannedLaunch,
    Routine,
    RoutineKind,
    Sampler,
    Scratch,
)
from flintc.ir.types import DTYPES, SYMBOLS, Dim, TensorType

Json = dict[str, Any]
T = TypeVar("T")

#: Characters of a symbolic dimension.
MAX_DIM = 64

_VALUE_KINDS = get_args(ValueKind)
_CROSSINGS = get_args(CrossingKind)
_PARAM_TYPES = get_args(ParamType)
_EFFECT_KINDS = get_args(EffectKind)
_ROUTINE_KINDS = get_args(RoutineKind)
_ARG_KINDS = ("value", "part", "scratch", "symbol")
_TRIGGERS = get_args(Trigger)
_DEPENDENT = frozenset({"prefetch", "trigger"})


# Graph -> JSON


def graph_to_json(graph: Graph) -> Json:
    """``graph`` as JSON data; keys with nothing to say are left out."""
    return {
        "name": graph.name,
        "values": [_value_to_json(v) for v in graph.values.values()],
        "ops": [_op_to_json(o) for o in graph.ops.values()],
        "launches": [_launch_to_json(x) for x in graph.launches],
        "outputs": list(graph.outputs),
        "head": [name for name in graph.ops if name in graph.head],
    }


def _given(**fields: Any) -> Json:
    return {key: value for key, value in fields.items() if value is not None and value != []}


def _type_to_json(type: TensorType) -> Json:
    return {"dtype": type.dtype, "shape": list(type.shape)}


def _value_to_json(value: Value) -> Json:
    return {
        "name": value.name,
        **_type_to_json(value.type),
        "kind": value.kind,
        **_given(layer=value.layer, source=value.source),
    }


def _op_to_json(op: Op) -> Json:
    attrs = {k: list(v) if isinstance(v, tuple) else v for k, v in op.attrs.items()}
    return {
        "name": op.name,
        "kind": op.kind,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "attrs": attrs,
        **_given(layer=op.layer),
    }


def _launch_to_json(launch: Launch) -> Json:
    crossings = [{"value": c.value, "kind": c.kind, **_given(group=c.group)} for c in launch.crossings]
    dependent = launch.dependent
    return {
        "name": launch.name,
        "role": launch.role,
        "ops": list(launch.ops),
        **_given(crossings=crossings, tile=launch.tile),
        **_given(dependent=dependent and _dependent_to_json(dependent)),
    }


def _dependent_to_json(dependent: Dependent) -> Json:
    alone = dependent.alone and _dependent_to_json(dependent.alone)
    return {"prefetch": list(dependent.prefetch), "trigger": dependent.trigger, **_given(alone=alone)}


# JSON -> Graph

_GRAPH = frozenset({"name", "values", "ops", "launches", "outputs", "head"})
_TYPE = frozenset({"dtype", "shape"})
_VALUE = frozenset({"name", "dtype", "shape", "kind"})
_OP = frozenset({"name", "kind", "inputs", "outputs", "attrs"})
_LAUNCH = frozenset({"name", "role", "ops"})
_LAUNCH_MORE = frozenset({"crossings", "tile", "dependent"})
_LAYER, _VALUE_MORE, _GROUP = frozenset({"layer"}), frozenset({"layer", "source"}), frozenset({"group"})


def graph_from_json(data: Any) -> Graph:
    """The graph that :func:`graph_to_json` wrote; BundleError where ``data`` is anything else."""
    return _graph(Cursor(data))


def _graph(at: Cursor) -> Graph:
    at.record(_GRAPH)
    values = _named(at["values"], _value, "value")
    ops = _ops(at["ops"], values)
    launches = tuple(_named(at["launches"], lambda c: _launch(c, ops, values), "launch").values())
    _check_partition(at["launches"], launches, ops)
    outputs = tuple(c.known(values, "value") for c in at["outputs"])
    head = frozenset(c.known(ops, "op") for c in at["head"])
    return Graph(at["name"].text(), values, ops, launches, outputs, head)


def _named(items: Cursor, read: Callable[[Cursor], T], what: str) -> dict[str, T]:
    """Items by name, each name once."""
    result: dict[str, T] = {}
    for item in items:
        entry = read(item)
        name = item["name"].text()
        if name in result:
            item.fail(f"a second {what} named {name!r}")
        result[name] = entry
    return result


def _dim(at: Cursor) -> Dim:
    """A number, or a product of numbers and run-time symbols."""
    if isinstance(at.data, str):
        factors = at.data.split("*")
        if len(at.data) > MAX_DIM or not all(f in SYMBOLS or (f.isascii() and f.isdigit()) for f in factors):
            at.fail(f"{at.data[:MAX_DIM]!r} is not a dimension")
        return at.data
    return at.whole()


def _tensor_type(at: Cursor) -> TensorType:
    return TensorType(at["dtype"].one_of(DTYPES), tuple(_dim(d) for d in at["shape"]))


def _maybe_text(at: Cursor) -> str | None:
    return None if at.data is None else at.text()


def _value(at: Cursor) -> Value:
    at.record(_VALUE, _VALUE_MORE)
    kind, layer, source = at["kind"].one_of(_VALUE_KINDS), at.get("layer").maybe_whole(), _maybe_text(at.get("source"))
    return Value(at["name"].text(), _tensor_type(at), kind, layer, source)


def _ops(items: Cursor, values: Mapping[str, Value]) -> dict[str, Op]:
    ops = _named(items, _op, "op")
    made: set[str] = set()
    for item, op in zip(items, ops.values(), strict=True):
        for name in (*op.inputs, *op.outputs):
            if name not in values:
                item.fail(f"unknown value {name!r}")
        for name in op.outputs:
            if name in made:
                item.fail(f"a second op makes {name!r}")
            made.add(name)
    return ops


def _op(at: Cursor) -> Op:
    at.record(_OP, _LAYER)
    attrs = {name: _attr(value) for name, value in at["attrs"].members()}
    kind = at["kind"].known(OPS, "op kind")
    layer = at.get("layer").maybe_whole()
    return Op(at["name"].text(), kind, at["inputs"].texts(), at["outputs"].texts(), attrs, layer)


def _attr(at: Cursor) -> Attr:
    if not isinstance(at.data, list):
        return at.scalar()
    return tuple(item.whole() for item in at)


def _launch(at: Cursor, ops: Mapping[str, Op], values: Mapping[str, Value]) -> Launch:
    at.record(_LAUNCH, _LAUNCH_MORE)
    crossings = tuple(_crossing(c, values) for c in at["crossings"]) if "crossings" in at.data else ()
    held = tuple(c.known(ops, "op") for c in at["ops"])
    if not held:
        at.fail("a launch without ops")
    dependent = _dependent(at["dependent"], values) if "dependent" in at.data else None
    return Launch(at["name"].text(), at["role"].text(), held, crossings, at.get("tile").maybe_whole(), dependent)


def _crossing(at: Cursor, values: Mapping[str, Value]) -> Crossing:
    at.record(frozenset({"value", "kind"}), _GROUP)
    return Crossing(at["value"].known(values, "value"), at["kind"].one_of(_CROSSINGS), _maybe_text(at.get("group")))


def _dependent(at: Cursor, values: Mapping[str, Value]) -> Dependent:
    at.record(_DEPENDENT, frozenset({"alone"}))
    alone = None
    if "alone" in at.data:
        at["alone"].record(_DEPENDENT)  # which has no ``alone`` in its turn
        alone = _order(at["alone"], values)
    return replace(_order(at, values), alone=alone)


def _order(at: Cursor, values: Mapping[str, Value]) -> Dependent:
    prefetch = tuple(c.known(values, "value") for c in at["prefetch"])
    return Dependent(prefetch, at["trigger"].one_of(_TRIGGERS))


def _check_partition(at: Cursor, launches: tuple[Launch, ...], ops: Mapping[str, Op]) -> None:
    held = [op for launch in launches for op in launch.ops]
    if len(held) != len(ops) or set(held) != set(ops):
        at.fail("the launches do not hold every op exactly once")


# Plan -> JSON


def plan_to_json(plan: Plan) -> Json:
    """``plan`` as JSON data, its graph included."""
    return {
        "graph": graph_to_json(plan.graph),
        "kernels": [_kernel_to_json(k) for k in plan.kernels.values()],
        "launches": [_planned_to_json(x) for x in plan.launches],
        "buffers": [{"name": b.name, "types": [_type_to_json(t) for t in b.types]} for b in plan.buffers.values()],
        "placement": dict(plan.placement),
        "scratch": _memory_to_json(plan.scratch),
        **_given(
            sampler=plan.sampler and _sampler_to_json(plan.sampler),
            general=plan.general and _general_to_json(plan.general),
        ),
    }


def _memory_to_json(memory: Mapping[str, Scratch]) -> list[Json]:
    return [{"name": s.name, **_type_to_json(s.type)} for s in memory.values()]


def _sampler_to_json(sampler: Sampler) -> Json:
    launches = [_planned_to_json(x) for x in sampler.launches]
    return {"launches": launches, "memory": _memory_to_json(sampler.memory), "most": sampler.most}


def _general_to_json(general: General) -> Json:
    routines = [
        {"name": r.name, "kind": r.kind, "ops": list(r.ops), "kernels": dict(r.kernels)} for r in general.routines
    ]
    return {"kernels": [_kernel_to_json(k) for k in general.kernels.values()], "routines": routines}


def _kernel_to_json(kernel: Kernel) -> Json:
    return {
        "name": kernel.name,
        "source": kernel.source,
        "params": [{"name": p.name, "type": p.type, "aligned": p.aligned} for p in kernel.params],
        "constants": dict(kernel.constants),
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "waits": kernel.waits,
        "max_registers": kernel.max_registers,
        "paths": [[_effect_to_json(e) for e in path] for path in kernel.paths],
        **_given(several=kernel.several, apart=kernel.apart or None),
    }


def _effect_to_json(effect: Effect) -> Json:
    more = _given(param=effect.param or None, last=list(effect.last), guards=list(effect.guards))
    return {"kind": effect.kind, **more, **_given(sure=None if effect.sure else False, earlier=list(effect.earlier))}


def _planned_to_json(launch: PlannedLaunch) -> Json:
    args = [{"kind": a.kind, "ref": a.ref} for a in launch.args]
    return {"name": launch.name, "kernel": launch.kernel, "grid": list(launch.grid), "args": args}


# JSON -> Plan

_PLAN = frozenset({"graph", "kernels", "launches", "buffers", "placement", "scratch"})
_PLAN_MORE = frozenset({"sampler", "general"})
_GENERAL, _ROUTINE = frozenset({"kernels", "routines"}), frozenset({"name", "kind", "ops", "kernels"})
_SAMPLER = frozenset({"launches", "memory", "most"})
_KERNEL = frozenset(
    {"name", "source", "params", "constants", "num_warps", "num_stages", "waits", "max_registers", "paths"}
)
_EFFECT, _EFFECT_MORE = frozenset({"kind"}), frozenset({"param", "last", "guards", "sure", "earlier"})
_PARAM = frozenset({"name", "type", "aligned"})
_PLANNED = frozenset({"name", "kernel", "grid", "args"})
_ARG = frozenset({"kind", "ref"})


def plan_from_json(data: Any) -> Plan:
    """The plan that :func:`plan_to_json` wrote; BundleError where ``data`` is anything else."""
    at = Cursor(data).record(_PLAN, _PLAN_MORE)
    graph = _graph(at["graph"])
    kernels = _named(at["kernels"], _kernel, "kernel")
    buffers = _named(at["buffers"], _buffer, "buffer")
    scratch = _named(at["scratch"], _scratch, "scratch buffer")
    placement = {}
    for name, where in at["placement"].members():
        if name not in graph.values:
            where.fail("no such value")
        placement[name] = where.known(buffers, "buffer")
    refs = {"value": graph.values, "part": graph.values, "scratch": scratch, "symbol": SYMBOLS}
    launches = tuple(_named(at["launches"], lambda c: _planned(c, kernels, refs), "launch").values())
    sampler = _sampler(at["sampler"], kernels, refs) if "sampler" in at.data else None
    general = _general(at["general"], graph, kernels) if "general" in at.data else None
    return Plan(graph, kernels, launches, buffers, placement, scratch, sampler, general)


def _sampler(at: Cursor, kernels: Mapping[str, Kernel], refs: Mapping[str, Any]) -> Sampler:
    at.record(_SAMPLER)
    memory = _named(at["memory"], _scratch, "scratch buffer")
    own = {**refs, "scratch": memory}
    launches = tuple(_named(at["launches"], lambda c: _planned(c, kernels, own), "launch").values())
    for item, launch in zip(at["launches"], launches, strict=True):
        if kernels[launch.kernel].waits:
            item.fail("a sampler's kernel must not wait")
    return Sampler(launches, memory, at["most"].whole())


def _general(at: Cursor, graph: Graph, others: Mapping[str, Kernel]) -> General:
    at.record(_GENERAL)
    kernels = _named(at["kernels"], _kernel, "kernel")
    for item, kernel in zip(at["kernels"], kernels.values(), strict=True):
        if kernel.name in others or kernel.waits:
            item.fail("a kernel of the general path has a name of its own and does not wait")
    routines = tuple(_named(at["routines"], lambda c: _routine(c, graph, kernels), "routine").values())
    served = [op for routine in routines for op in routine.ops]
    if len(served) != len(graph.ops) or set(served) != set(graph.ops):
        at["routines"].fail("the routines do not serve every op exactly once")
    return General(kernels, routines)


def _routine(at: Cursor, graph: Graph, kernels: Mapping[str, Kernel]) -> Routine:
    at.record(_ROUTINE)
    ops = tuple(op.known(graph.ops, "op") for op in at["ops"])
    used = {purpose: name.known(kernels, "kernel") for purpose, name in at["kernels"].members()}
    return Routine(at["name"].text(), at["kind"].one_of(_ROUTINE_KINDS), ops, used)


def _kernel(at: Cursor) -> Kernel:
    at.record(_KERNEL, frozenset({"several", "apart"}))
    params = tuple(_named(at["params"], _param, "parameter").values())
    constants = {}
    for name, value in at["constants"].members():
        constant = value.scalar()
        if constant is None or isinstance(constant, str):
            value.fail("expected a number or boolean")
        constants[name] = constant
    warps, stages, waits = at["num_warps"].whole(), at["num_stages"].whole(), at["waits"].flag()
    registers = at["max_registers"].whole()
    names = frozenset(p.name for p in params)
    paths = tuple(tuple(_effect(e, names) for e in path) for path in at["paths"])
    return Kernel(
        at["name"].text(), at["source"].text(), params, constants, warps, stages, waits, registers, paths,
        _maybe_text(at.get("several")), "apart" in at.data and at["apart"].flag(),
    )  # fmt: skip


def _effect(at: Cursor, params: frozenset[str]) -> Effect:
    at.record(_EFFECT, _EFFECT_MORE)
    kind = at["kind"].one_of(_EFFECT_KINDS)
    if (kind in ("wait", "trigger")) == ("param" in at.data):
        at.fail(f"a {kind} {'takes no' if 'param' in at.data else 'needs a'} parameter")
    param = at["param"].known(params, "parameter") if "param" in at.data else ""
    last, guards, earlier = (
        tuple(c.known(params, "parameter") for c in at[key]) if key in at.data else ()
        for key in ("last", "guards", "earlier")
    )
    sure = at["sure"].flag() if "sure" in at.data else True
    if "earlier" in at.data and (kind != "read" or len(earlier) != 2):
        at.fail("only a read leaves out what a step writes, as its positions and sequences tell")
    return Effect(kind, param, last, guards, sure, earlier)


def _param(at: Cursor) -> Param:
    at.record(_PARAM)
    return Param(at["name"].text(), at["type"].one_of(_PARAM_TYPES), at["aligned"].flag())


def _buffer(at: Cursor) -> Buffer:
    at.record(frozenset({"name", "types"}))
    return Buffer(at["name"].text(), tuple(_tensor_type(t.record(_TYPE)) for t in at["types"]))


def _scratch(at: Cursor) -> Scratch:
    at.record(_TYPE | {"name"})
    return Scratch(at["name"].text(), _tensor_type(at))


def _planned(at: Cursor, kernels: Mapping[str, Kernel], refs: Mapping[str, Any]) -> PlannedLaunch:
    at.record(_PLANNED)
    kernel = kernels[at["kernel"].known(kernels, "kernel")]
    grid = tuple(_dim(d) for d in at["grid"])
    args = tuple(_arg(a, refs) for a in at["args"])
    if len(grid) != 3:
        at["grid"].fail("expected three dimensions")
    if len(args) != len(kernel.params):
        at["args"].fail(f"{len(args)} arguments for the {len(kernel.params)} parameters of {kernel.name!r}")
    return PlannedLaunch(at["name"].text(), kernel.name, (grid[0], grid[1], grid[2]), args)


def _arg(at: Cursor, refs: Mapping[str, Any]) -> Arg:
    at.record(_ARG)
    kind, ref = at["kind"].one_of(_ARG_KINDS), at["ref"].text()
    name, _, component = ref.partition("#") if kind == "part" else (ref, "", "")
    if name not in refs[kind] or (kind == "part" and not component):
        at.fail(f"unknown {kind} {ref!r}")
    return Arg(kind, ref)
