"""Graphs and plans through JSON and back; anything else is refused, at its path."""

import copy
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintc.errors import BundleError
from flintc.ir.build import build
from flintc.ir.graph import Crossing, Dependent, Graph, Launch
from flintc.ir.lower import lower_attention
from flintc.ir.plan import Arg, Buffer, Effect, Kernel, Param, Plan, PlannedLaunch, Scratch
from flintc.ir.serialize import graph_from_json, graph_to_json, plan_from_json, plan_to_json
from flintc.ir.types import TensorType
from flintc.spec import bind_defaults, load_spec

OTHER = Path(__file__).parents[1] / "data" / "other.yaml"


def unfused(name, weights="bf16") -> Graph:
    return lower_attention(build(bind_defaults(load_spec(name)), weights), 16)


def fused(name) -> Graph:
    """The first two launches in one, with a crossing of each shape and a dependent launch."""
    graph = unfused(name)
    a, b, c, *rest = graph.launches
    value = graph.ops[a.ops[0]].outputs[0]
    crossings = (Crossing(value, "recompute"), Crossing(value, "last-arriver", "row"))
    weight = next(v for v in graph.values if v.startswith("L0.w."))
    both = Launch("both", "add+norm", a.ops + b.ops, crossings, 16, Dependent((weight,), "late"))
    return graph.with_launches((both, replace(c, dependent=Dependent()), *rest))


def planned(graph: Graph) -> Plan:
    """A plan of one kernel for every launch: as many parts as a real one, and no sense."""
    params = tuple(Param(f"p{i}", t) for i, t in enumerate(("*bf16", "*u8", "*i32", "i32")))
    path = (
        Effect("wait", sure=False),
        Effect("read", "p0", guards=("p1",), earlier=("p1", "p2")),
        Effect("write", "p1", last=("p2",)),
    )
    constants = {"N": 64, "EPS": 1e-6, "SINKS": True}
    kernel = Kernel("k", "def k():\n    pass\n", params, constants, 4, 3, True, 128, (path, (Effect("trigger"),)))
    ref = next(v for v in graph.values.values() if v.kind == "weight").name
    args = (Arg("value", ref), Arg("part", f"{ref}#codes"), Arg("scratch", "arrivals"), Arg("symbol", "B"))
    launches = tuple(PlannedLaunch(x.name, "k", ("16*B", 1, "T"), args) for x in graph.launches)
    activations = [v for v in graph.values.values() if v.kind == "activation"]
    buffers = {"b0": Buffer("b0", tuple(dict.fromkeys(v.type for v in activations)))}
    scratch = {"arrivals": Scratch("arrivals", TensorType("i32", ("B", 8)))}
    return Plan(graph, {"k": kernel}, launches, buffers, {v.name: "b0" for v in activations}, scratch)


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


@pytest.mark.parametrize("make", [unfused, fused, lambda n: unfused(n, "nvfp4")], ids=["unfused", "fused", "nvfp4"])
@pytest.mark.parametrize("name", ["flint", "tiny-flint", OTHER], ids=["flint", "tiny", "other"])
def test_graph_round_trip(make, name):
    graph = make(name)
    back = graph_from_json(through_json(graph_to_json(graph)))
    assert back == graph
    assert list(back.values) == list(graph.values) and list(back.ops) == list(graph.ops)
    assert [op.layer for op in back.ops.values()] == [op.layer for op in graph.ops.values()]
    for op in graph.ops.values():
        for name, attr in op.attrs.items():
            assert type(back.ops[op.name].attrs[name]) is type(attr)


def test_equal_graphs_give_equal_bytes():
    first, second = (json.dumps(graph_to_json(fused("tiny-flint"))) for _ in range(2))
    assert first == second == json.dumps(graph_to_json(graph_from_json(json.loads(first))))


@pytest.mark.parametrize("name", ["flint", OTHER], ids=["flint", "other"])
def test_plan_round_trip(name):
    plan = planned(fused(name))
    back = plan_from_json(through_json(plan_to_json(plan)))
    assert back == plan
    assert list(back.placement.items()) == list(plan.placement.items())
    assert json.dumps(plan_to_json(back)) == json.dumps(plan_to_json(plan))


def test_a_plan_of_all_of_flint_loads_quickly():
    """Well under half a second for 1,100 ops, on a machine that may be busy: best of three."""
    text, spent = json.dumps(plan_to_json(planned(unfused("flint")))), []
    for _ in range(3):
        start = time.perf_counter()
        plan_from_json(json.loads(text))
        spent.append(time.perf_counter() - start)
    assert min(spent) < 0.5


PLAN = plan_to_json(planned(fused("tiny-flint")))


def damaged(path, value):
    """PLAN with what is at ``path`` replaced by ``value``; ``...`` takes it out."""
    data = copy.deepcopy(PLAN)
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


REFUSED = [
    (("graph",), ..., "$: missing 'graph'"),
    (("extra",), 1, "$: unknown key 'extra'"),
    (("graph",), [], "$.graph: expected an object"),
    (("graph", "name"), 3, "$.graph.name: expected text"),
    (("graph", "values"), {}, "$.graph.values: expected a list"),
    (("graph", "values", 3, "dtype"), "fp8", "$.graph.values[3].dtype: 'fp8' is not one of bf16, f32, i32, nvfp4"),
    (("graph", "values", 3, "kind"), "thing", "$.graph.values[3].kind: 'thing' is not one of"),
    (("graph", "values", 3, "shape", 0), -1, "$.graph.values[3].shape[0]: expected a whole number"),
    (("graph", "values", 3, "shape", 0), True, "$.graph.values[3].shape[0]: expected a whole number"),
    (("graph", "values", 3, "shape", 0), 2.0, "$.graph.values[3].shape[0]: expected a whole number"),
    (("graph", "values", 3, "shape", 0), 1 << 70, "$.graph.values[3].shape[0]: expected a whole number below 2^53"),
    (("graph", "values", 3, "shape", 0), "Z*2", "$.graph.values[3].shape[0]: 'Z*2' is not a dimension"),
    (("graph", "values", 3, "shape", 0), "B*", "'B*' is not a dimension"),
    (("graph", "values", 3, "shape", 0), "9" * 5000, "is not a dimension"),
    (("graph", "values", 3, "shape", 0), "2*²", "is not a dimension"),
    (("graph", "values", 3, "name"), "ids", "a second value named 'ids'"),
    (("graph", "ops", 2, "kind"), "conv", "$.graph.ops[2].kind: unknown op kind 'conv'"),
    (("graph", "ops", 2, "inputs"), ["nowhere"], "$.graph.ops[2]: unknown value 'nowhere'"),
    (("graph", "ops", 2, "inputs"), "ids", "$.graph.ops[2].inputs: expected a list of texts"),
    (("graph", "ops", 2, "outputs"), ["residual"], "$.graph.ops[2]: a second op makes 'residual'"),
    (("graph", "ops", 2, "attrs", "out"), {}, "$.graph.ops[2].attrs.out: expected a number, text"),
    (("graph", "ops", 2, "attrs", "out"), float("inf"), "$.graph.ops[2].attrs.out: expected a finite number"),
    (("graph", "ops", 2, "attrs", "heads"), ["a"], "$.graph.ops[2].attrs.heads[0]: expected a whole number"),
    (("graph", "ops", 2, "layer"), "0", "$.graph.ops[2].layer: expected a whole number"),
    (("graph", "launches", 0, "ops"), [], "$.graph.launches[0]: a launch without ops"),
    (("graph", "launches", 0, "ops", 0), "nothing", "$.graph.launches[0].ops[0]: unknown op 'nothing'"),
    (("graph", "launches", 1), ..., "$.graph.launches: the launches do not hold every op exactly once"),
    (("graph", "launches", 1, "ops", 0), "embed", "the launches do not hold every op exactly once"),
    (("graph", "launches", 0, "crossings", 0, "kind"), "magic", "$.graph.launches[0].crossings[0].kind: 'magic'"),
    (("graph", "launches", 0, "crossings", 0, "value"), "x", "$.graph.launches[0].crossings[0].value: unknown value"),
    (
        ("graph", "launches", 0, "dependent", "trigger"),
        "soon",
        "dependent.trigger: 'soon' is not one of early, waited, late",
    ),
    (("graph", "launches", 0, "dependent", "prefetch", 0), "x", "dependent.prefetch[0]: unknown value 'x'"),
    (("graph", "launches", 0, "tile"), "16", "$.graph.launches[0].tile: expected a whole number"),
    (("graph", "outputs", 0), "x", "$.graph.outputs[0]: unknown value 'x'"),
    (("graph", "head", 0), "x", "$.graph.head[0]: unknown op 'x'"),
    (("kernels", 0, "params", 1, "type"), "*fp8", "$.kernels[0].params[1].type: '*fp8' is not one of"),
    (("kernels", 0, "params", 1, "name"), "p0", "a second parameter named 'p0'"),
    (("kernels", 0, "constants", "N"), "64", "$.kernels[0].constants.N: expected a number or boolean"),
    (("kernels", 0, "waits"), 1, "$.kernels[0].waits: expected true or false"),
    (("kernels", 0, "paths", 0, 1, "param"), "p9", "$.kernels[0].paths[0][1].param: unknown parameter 'p9'"),
    (("kernels", 0, "paths", 0, 1, "guards", 0), "p9", "$.kernels[0].paths[0][1].guards[0]: unknown parameter 'p9'"),
    (("kernels", 0, "paths", 0, 1, "kind"), "wait", "$.kernels[0].paths[0][1]: a wait takes no parameter"),
    (("kernels", 0, "paths", 0, 0, "kind"), "read", "$.kernels[0].paths[0][0]: a read needs a parameter"),
    (("kernels", 0, "paths", 0, 1, "kind"), "write", "$.kernels[0].paths[0][1]: only a read leaves out what"),
    (("kernels", 0, "paths", 0, 1, "earlier"), ["p1"], "$.kernels[0].paths[0][1]: only a read leaves out what"),
    (("kernels", 0, "paths", 0, 1, "earlier", 0), "p9", "$.kernels[0].paths[0][1].earlier[0]: unknown parameter 'p9'"),
    (("kernels", 0, "source"), None, "$.kernels[0].source: expected text"),
    (("launches", 0, "kernel"), "x", "$.launches[0].kernel: unknown kernel 'x'"),
    (("launches", 0, "grid"), [1, 1], "$.launches[0].grid: expected three dimensions"),
    (("launches", 0, "args"), [], "$.launches[0].args: 0 arguments for the 4 parameters of 'k'"),
    (("launches", 0, "args", 0, "kind"), "pointer", "$.launches[0].args[0].kind: 'pointer' is not one of"),
    (("launches", 0, "args", 0, "ref"), "x", "$.launches[0].args[0]: unknown value 'x'"),
    (("launches", 0, "args", 1, "ref"), "ids", "$.launches[0].args[1]: unknown part 'ids'"),
    (("launches", 0, "args", 2, "ref"), "x", "$.launches[0].args[2]: unknown scratch 'x'"),
    (("launches", 0, "args", 3, "ref"), "Z", "$.launches[0].args[3]: unknown symbol 'Z'"),
    (("launches", 1, "name"), "both", "a second launch named 'both'"),
    (("buffers", 0, "types", 0, "shape"), 3, "$.buffers[0].types[0].shape: expected a list"),
    (("placement", "nowhere"), "b0", "$.placement.nowhere: no such value"),
    (("placement", "residual"), "b9", "$.placement.residual: unknown buffer 'b9'"),
    (("scratch", 0, "dtype"), None, "$.scratch[0].dtype: None is not one of"),
]


@pytest.mark.parametrize(("path", "value", "said"), REFUSED, ids=[said[:60] for *_, said in REFUSED])
def test_damage_is_told_at_its_path(path, value, said):
    with pytest.raises(BundleError) as caught:
        plan_from_json(damaged(path, value))
    assert said in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("data", [None, 3, "x", [], {}, {"graph": None}])
def test_what_is_no_plan_at_all(data):
    for read in (plan_from_json, graph_from_json):
        with pytest.raises(BundleError):
            read(data)


_junk = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.text(max_size=3), st.just([]), st.just({}), st.floats()
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_harmless(data):
    """One place of the JSON replaced by anything: never an error of another kind."""
    damaged_plan = copy.deepcopy(PLAN)
    at, path = damaged_plan, []
    while True:
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        path.append(data.draw(st.sampled_from(keys)))
        below = at[path[-1]]
        if not isinstance(below, dict | list) or not below or data.draw(st.integers(0, 5)) == 0:
            break
        at = below
    at[path[-1]] = data.draw(_junk)
    try:
        plan_from_json(damaged_plan)
    except BundleError as error:
        assert str(error).startswith("$")
