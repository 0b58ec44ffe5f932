"""Each invariant of a graph, broken once: the verifier says which, and where."""

from dataclasses import replace

import pytest
from graphs import OTHER, Sketch, pipeline

from flintc.errors import VerificationError
from flintc.ir.graph import Crossing, Dependent, Launch, Value
from flintc.ir.types import TensorType
from flintc.ir.verify import find_issues, verify

EPS = 1e-6


def chain():
    """x, r -> add -> norm -> linear -> silu."""
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.given("r", "bf16", "B", 64)
    s.weight("w.norm", "f32", 64)
    s.weight("w", "bf16", 96, 64)
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w.norm"], "h", eps=EPS)
    s.op("gate_up", "linear", ["h", "w"], "gu")
    s.op("silu", "silu_mul", ["gu"], "act")
    return s


def graph():
    return chain().graph("act", "residual")


def with_op(g, name, **changes):
    return replace(g, ops={**g.ops, name: replace(g.ops[name], **changes)})


def with_launches(g, *launches):
    """The launches of ``g``, those of equal name replaced."""
    new = {x.name: x for x in launches}
    return g.with_launches(tuple(new.get(x.name, x) for x in g.launches))


def said(g):
    return [f"{i.at}: {i.message}" for i in find_issues(g)]


@pytest.mark.parametrize("spec", ["flint", "tiny-flint", OTHER])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_real_graphs_are_sound_at_every_step(spec, weights):
    for step in pipeline(spec, weights).steps:
        assert find_issues(step.graph) == []


def test_a_sound_graph_passes():
    verify(graph())


def test_undeclared_value():
    assert said(with_op(graph(), "norm", inputs=("sun", "w.norm"))) == ["norm: value sun is not declared"]


def test_two_makers():
    got = said(with_op(graph(), "silu", outputs=("gu",)))
    assert "gate_up: gu is made 2 times" in got and "silu: gu is made 2 times" in got


def test_output_that_nothing_makes():
    assert said(replace(graph(), outputs=("act", "x"))) == ["None: output x is made by no op"]


def test_misfiled_names():
    g = graph()
    ops = {("nrom" if k == "norm" else k): op for k, op in g.ops.items()}
    assert "nrom: op norm is stored under the name nrom" in said(replace(g, ops=ops))


def test_activation_without_a_maker():
    g = graph()
    lost = Value("lost", TensorType("bf16", ("B", 64)), "activation")
    g = replace(with_op(g, "norm", inputs=("lost", "w.norm")), values={**g.values, "lost": lost})
    assert said(g) == ["norm: lost is made by no op"]


def test_an_op_that_makes_a_weight():
    g = graph()
    values = {**g.values, "h": replace(g.values["h"], kind="weight")}
    assert "norm: h is a given weight; an op may not make it" in said(replace(g, values=values))


def test_read_before_made():
    g = graph()
    order = ("add", "gate_up", "norm", "silu")
    assert said(replace(g, ops={o: g.ops[o] for o in order})) == ["gate_up: h is read before it is made"]


def test_unknown_op():
    assert said(with_op(graph(), "silu", kind="gelu_mul")) == ["silu: there is no op gelu_mul"]


def test_missing_attribute():
    assert said(with_op(graph(), "norm", attrs={})) == ["norm: attributes are [], norm has ['eps']"]


def test_inputs_that_do_not_fit():
    assert said(with_op(graph(), "norm", inputs=("sum", "w"))) == ["norm: weight is bf16[96, 64], expected f32"]


def test_changed_type():
    g = graph()
    wide = replace(g.values["h"], type=TensorType("f32", ("B", 64)))
    got = said(replace(g, values={**g.values, "h": wide}))
    assert "norm: h is declared f32[B, 64], norm makes bf16[B, 64]" in got


def split_attention():
    """Partials of at most three runs over the whole context, and their merge."""
    s = Sketch()
    s.given("q", "bf16", "B", 2, 16)
    s.cached()
    cut = {"chunk": 8, "partials": 3}
    s.op("partial", "attention_partial", ["q", "cache", "positions", "seqs", "table"], "o m l", scale=1.0, **cut)
    s.op("merge", "attention_merge", ["o", "m", "l", "positions", "seqs"], "a", **cut)
    return s.graph("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 5}, "it goes without a window, and only so"),
        ({"partials": None}, "it goes without a window, and only so"),
        ({"partials": 0}, "partials must be positive, not 0"),
        ({"partials": -2}, "partials must be positive, not -2"),
    ],
)
@pytest.mark.parametrize("name", ["partial", "merge"])
def test_as_many_partials_as_make_no_sense(name, changes, message):
    g = split_attention()
    verify(g)
    with pytest.raises(VerificationError, match=f"{name}: .*{message}"):
        verify(with_op(g, name, attrs={**g.ops[name].attrs, **changes}))


def test_a_merge_of_more_partials_than_there_are():
    g = split_attention()
    with pytest.raises(VerificationError, match="make 4 splits"):
        verify(with_op(g, "merge", attrs={**g.ops["merge"].attrs, "partials": 4}))


def test_op_in_no_launch_and_in_two():
    g = graph()
    assert said(g.with_launches(g.launches[1:])) == ["add: the op is in no launch"]
    twice = Launch("twice", "norm", ("norm",))
    got = said(g.with_launches((*g.launches, twice)))
    assert got == ["norm: the op is in 2 launches"] * 2


def test_unknown_op_in_a_launch_and_empty_launch():
    g = graph()
    got = said(g.with_launches((*g.launches, Launch("ghost", "norm", ("ghost",)), Launch("empty", "norm", ()))))
    assert got == ["ghost: there is no op named ghost", "empty: the launch has no op"]


def test_two_launches_of_one_name():
    g = graph()
    renamed = replace(g.launches[1], name="add")
    assert "add: 2 launches have this name" in said(g.with_launches((g.launches[0], renamed, *g.launches[2:])))


def test_launches_out_of_order():
    g = graph()
    a, b, c, d = g.launches
    assert said(g.with_launches((a, c, b, d))) == ["gate_up: h is made by norm, which is launched later"]


def test_ops_out_of_order_inside_a_launch():
    g = chain().fused(["act", "residual"], "add_norm", "norm add", Crossing("sum", "local"))
    assert said(g) == ["norm: sum is made by add, which is launched later"]


def test_launches_that_wait_for_each_other():
    g = chain().graph("act", "residual")
    loop = Launch("loop", "loop", ("norm", "silu"))
    got = said(g.with_launches((g.launches[0], loop, g.launches[2])))
    assert got == ["loop: launches wait for each other: loop -> gate_up -> loop"]


def test_unstated_crossing():
    g = chain().fused(["act", "residual"], "add_norm", "add norm")
    assert said(g) == ["add: sum stays inside launch add_norm; how it crosses is not stated"]


def test_stale_crossing():
    crossings = (Crossing("sum", "local"), Crossing("h", "local"))
    g = chain().fused(["act", "residual"], "add_norm", "add norm", *crossings)
    assert said(g) == ["add_norm: h does not cross inside this launch; its crossing is stale"]


def test_crossing_stated_twice():
    crossings = (Crossing("sum", "local"), Crossing("sum", "recompute"))
    g = chain().fused(["act", "residual"], "add_norm", "add norm", *crossings)
    assert said(g) == ["add: the crossing of sum is stated 2 times"]


def caches(*, read_late=False, write_twice=False):
    s = Sketch()
    s.given("q", "bf16", "B", 2, 16)
    s.given("kv", "bf16", "B", 2, 16)
    s.cached()
    write = ["kv", "kv", "cache", "positions", "seqs", "table"]
    s.op("write", "kv_write", write, "cache.1", v_heads=(0, 2))
    if write_twice:
        s.op("write2", "kv_write", write, "cache.2", v_heads=(0, 2))
    seen = "cache" if read_late else "cache.1"
    s.op("attend", "attention", ["q", seen, "positions", "seqs", "table"], "a", scale=0.25)
    return s.graph("a", "cache.1")


def test_a_new_version_is_read_after_it_is_written():
    assert said(caches()) == []


def test_old_version_read_after_its_successor_is_written():
    assert said(caches(read_late=True)) == ["attend: cache is read when write may have overwritten it"]


def test_two_successors():
    assert said(caches(write_twice=True)) == ["write2: cache has a successor already, written by write"]


def chained(g, **prefetch):
    launches = [
        replace(x, dependent=Dependent(prefetch.get(x.name, ()), "early" if i else "late"))
        for i, x in enumerate(g.launches)
    ]
    return g.with_launches(tuple(launches))


def test_dependent_launch_for_every_launch_or_none():
    g = chained(graph(), norm=("w.norm",), gate_up=("w",))
    assert said(g) == []
    got = said(with_launches(g, replace(g.launches[2], dependent=None)))
    assert got == ["gate_up: it does not wait, so nothing after it can rely on what came before it"]


def test_nothing_that_changes_is_fetched_above_the_wait():
    assert said(chained(graph(), norm=("sum",))) == [
        "norm: sum may not be prefetched: this step may still be to write it"
    ]
    assert said(chained(graph(), add=("x",))) == ["add: x may not be prefetched: it changes from step to step"]
    assert said(chained(graph(), norm=("w",))) == ["norm: it is to prefetch w, which it does not read"]


def test_the_first_launch_may_not_trigger_early():
    g = chained(graph())
    for first in (Dependent(), Dependent((), "late", Dependent()), Dependent((), "early", Dependent((), "late"))):
        got = said(with_launches(g, replace(g.launches[0], dependent=first)))
        assert got == ["add: the first launch triggers below its wait: positions and tables may still be being written"]
    assert said(with_launches(g, replace(g.launches[0], dependent=Dependent((), "waited")))) == []


def test_a_step_of_one_row_is_chained_in_one_way():
    g = chained(graph())
    twice = Dependent((), "late", Dependent((), "late", Dependent((), "late")))
    assert said(with_launches(g, replace(g.launches[0], dependent=twice))) == [
        "add: a step of one row has no fewer rows"
    ]


def test_errors_are_printed_under_the_op_they_concern():
    g = chain().fused(["act", "residual"], "add_norm", "add norm")
    with pytest.raises(VerificationError) as error:
        verify(g)
    assert str(error.value).splitlines() == [
        "graph sketch: one invariant is broken: add: sum stays inside launch add_norm; how it crosses is not stated",
        "graph sketch: 3 launches, 4 ops",
        "  add_norm  16 rows a program",
        "   │ sum f32[B, 64], residual bf16[B, 64] = add(x=x, residual=r)",
        "   │     ^ sum stays inside launch add_norm; how it crosses is not stated",
        "   │ h bf16[B, 64] = norm(x=sum, weight=w.norm f32[64])  eps=1e-06",
        "  (2 sound launches are not shown)",
    ]


@pytest.mark.parametrize(
    "broken",
    [
        lambda g: with_op(g, "norm", inputs=("sun", "w.norm")),
        lambda g: with_op(g, "silu", kind="gelu_mul"),
        lambda g: g.with_launches(g.launches[1:]),
        lambda g: g.with_launches((*g.launches, Launch("ghost", "norm", ("ghost",)))),
        lambda g: replace(g, outputs=("nowhere",)),
        lambda g: with_op(g, "norm", inputs=("sum",)),
    ],
)
def test_however_broken_a_graph_is_it_can_be_shown(broken):
    with pytest.raises(VerificationError, match="\\^"):
        verify(broken(graph()))
