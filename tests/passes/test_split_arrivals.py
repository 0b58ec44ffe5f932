"""Pass 7: where a launch is cut, what its halves are, and that all else stays as it was."""

import random
from collections import Counter

import pytest
from graphs import OTHER, Sketch, baseline, crossings, partition, pipeline
from random_graphs import grow

from flintc.ir.verify import verify
from flintc.passes import PASSES, run_pipeline
from flintc.passes.dependent_launch import DependentLaunch
from flintc.passes.split_arrivals import ROLES, SplitArrivals

EPS = 1e-6
NAMES = list(PASSES)
JOINING = NAMES[:-2]
SPECS = ["flint", "tiny-flint", OTHER]


def chained_and_cut(spec, weights=None):
    """The graphs before and after the pass; Flint's weights are packed, or not all of its launches would be cut."""
    chained, cut = pipeline(spec, weights or ("nvfp4" if spec == "flint" else "bf16")).steps[-2:]
    assert (chained.name, cut.name) == ("dependent-launch", "split-arrivals")
    return chained.graph, cut.graph


def layer(n, spec="tiny-flint"):
    return chained_and_cut(spec)[1].layer_launches(n)


def arrivals(graph):
    return [(x.name, c.value) for x in graph.launches for c in x.crossings if c.kind == "last-arriver"]


def by_ops(graph):
    return {x.ops: x for x in graph.launches}


def described(n):
    """Each launch of a layer: its name, its role, its ops."""
    return [(x.name, x.role, " ".join(o.removeprefix(f"L{n}.") for o in x.ops)) for x in layer(n)]


def test_what_a_moe_layer_is_cut_into():
    assert described(2) == [
        ("L2.add_norm", "add_norm", "add norm"),
        ("L2.qkv", "linear", "qkv"),
        ("L2.heads", "heads", "q_norm k_norm rope kv_write"),
        ("L2.attention", "attention_partial", "attention"),
        ("L2.attention_merge", "attention_merge", "attention_merge"),
        ("L2.o_proj", "linear", "o_proj"),
        ("L2.route", "route", "mlp_add mlp_norm router"),
        ("L2.topk", "topk", "topk"),
        ("L2.expert_gate_up", "expert_gate_up", "expert_gate_up expert_silu shared_gate_up shared_silu"),
        ("L2.expert_down", "expert_down", "expert_down combine shared_down shared_add"),
    ]


def test_what_a_dense_layer_without_rope_is_cut_into():
    assert described(0) == [
        ("L0.norm", "norm", "norm"),
        ("L0.qkv", "linear", "qkv"),
        ("L0.heads", "heads", "q_norm k_norm kv_write"),
        ("L0.attention", "attention_partial", "attention"),
        ("L0.attention_merge", "attention_merge", "attention_merge"),
        ("L0.o_proj", "linear", "o_proj"),
        ("L0.add_norm", "add_norm", "mlp_add mlp_norm"),
        ("L0.gate_up", "gate_up", "gate_up silu"),
        ("L0.down", "linear", "down"),
    ]


def test_a_matrix_product_keeps_its_tile_and_what_follows_has_none():
    tiles = {x.role: x.tile for x in layer(2) if x.name != "L2.o_proj"}
    before = {x.role: x.tile for x in chained_and_cut("tiny-flint")[0].layer_launches(2)}
    assert (tiles["linear"], tiles["route"]) == (before["qkv"], before["route"])
    assert None not in (before["qkv"], before["route"])
    assert [tiles[role] for role in ("heads", "attention_merge", "topk")] == [None] * 3


@pytest.mark.parametrize("spec", SPECS)
def test_no_op_is_touched_and_every_inner_value_says_how_it_crosses(spec):
    before, after = chained_and_cut(spec)
    assert after.ops is before.ops and after.values is before.values and after.outputs == before.outputs
    assert [o for x in after.launches for o in x.ops] == [o for x in before.launches for o in x.ops]
    for launch in after.launches:
        assert Counter(c.value for c in launch.crossings) == Counter(after.inner_values(launch))
    stated = {c.value: c for x in before.launches for c in x.crossings if c.kind != "last-arriver"}
    assert {c.value: c for x in after.launches for c in x.crossings} == stated


def arriving_roles(graph):
    return {x.role for x in graph.launches if any(c.kind == "last-arriver" for c in x.crossings)}


@pytest.mark.parametrize("spec", SPECS)
def test_no_program_is_left_that_waits_for_others(spec):
    before, after = chained_and_cut(spec)
    assert arriving_roles(before) == set(ROLES)
    assert arrivals(after) == []


def test_what_streams_its_weights_for_long_is_left_whole():
    """The 21 MB of a qkv in BF16; packed they are 6."""
    before, after = chained_and_cut("flint", "bf16")
    assert arriving_roles(after) == {"qkv"}
    whole = [x for x in before.launches if x.role == "qkv"]
    assert len(whole) == 49
    assert [x for x in after.launches if x.role == "qkv"] == whole
    counts = {c.rule: c for c in pipeline("flint").steps[-1].matches}
    assert (counts["qkv at its arrival"].tried, counts["qkv at its arrival"].matched) == (49, 0)
    assert sum(counts["qkv at its arrival"].refused.values()) == 49
    assert (counts["attention at its arrival"].matched, counts["route at its arrival"].matched) == (49, 47)


@pytest.mark.parametrize(("more", "whole"), [(0, True), (1, False)])
def test_how_much_is_long_is_an_option(more, whole):
    """From so many bytes of weights on, all of a launch's counted: rows, columns, two norms of heads in FP32."""
    weights = 256 * 128 * 2 + 2 * 32 * 4
    got = run_pipeline(
        baseline("tiny-flint"), [*JOINING, "dependent-launch", SplitArrivals(streams=weights + more)]
    ).graph
    assert arriving_roles(got) == ({"qkv"} if whole else set())


@pytest.mark.parametrize("spec", SPECS)
def test_what_arrived_is_written_for_the_launch_that_follows(spec):
    before, after = chained_and_cut(spec)
    at = {o: i for i, x in enumerate(after.launches) for o in x.ops}
    for _, value in arrivals(before):
        first = at[after.producers[value]]
        assert value in after.writes(after.launches[first])
        assert {at[o] for o in after.consumers[value]} == {first + 1}


@pytest.mark.parametrize("spec", SPECS)
def test_a_launch_without_arrival_is_left_alone(spec):
    before, after = chained_and_cut(spec)
    cut = {name for name, _ in arrivals(before)}
    assert [x for x in before.launches if x.name not in cut] == [x for x in after.launches if x.ops in by_ops(before)]


def test_launches_that_no_pass_has_joined_are_left_alone():
    run = run_pipeline(baseline("tiny-flint"), NAMES, disabled=JOINING)
    assert run.steps[-1].graph.launches == run.steps[-2].graph.launches
    assert run.steps[-1].matched == 0


def test_a_role_alone_is_no_reason_to_cut():
    """A lone ``attention``, which is not lowered, has the role of one that merges."""
    s = Sketch()
    s.given("q", "bf16", "B", 4, 16)
    s.cached()
    s.op("attention", "attention", ["q", "cache", "positions", "seqs", "table"], "a", scale=0.25)
    run = run_pipeline(s.graph("a"), NAMES)
    assert [x.role for x in run.graph.launches] == ["attention"]
    assert run.graph.launches == run.steps[-2].graph.launches


def test_what_each_half_fetches():
    """What the launch fetched, each half its own: weight and norms are no longer one launch's."""
    before = {x.role: x.dependent.prefetch for x in chained_and_cut("tiny-flint")[0].layer_launches(2)}
    after = {x.name.removeprefix("L2."): x.dependent.prefetch for x in layer(2)}
    assert after == {
        "add_norm": ("L2.w.input_norm",),
        "qkv": ("L2.w.qkv",),
        "heads": ("L2.w.q_norm", "L2.w.k_norm", "rope_table"),
        "attention": ("L2.cache.1",),
        "attention_merge": ("L2.w.sinks",),
        "o_proj": ("L2.w.o",),
        "route": ("L2.w.mlp_norm", "L2.w.router"),
        "topk": (),
        "expert_gate_up": ("L2.w.shared_gate_up",),
        "expert_down": ("L2.w.shared_down",),
    }
    assert after["qkv"] + after["heads"] == before["qkv"]
    assert after["attention"] + after["attention_merge"] == before["attention"]
    assert after["route"] + after["topk"] == before["route"]


def test_the_chain_begins_and_goes_on_as_before():
    for spec in ("tiny-flint", OTHER):
        first, *rest = chained_and_cut(spec)[1].launches
        assert (first.dependent.prefetch, first.dependent.trigger) == ((), "late")
        assert {x.dependent.trigger for x in rest} == {"early"}


def test_one_row_still_fetches_its_experts_ahead():
    """They are chosen in a launch of their own now, which is further from those that read them, not nearer."""
    chain = {x.role: (x.dependent.alone.prefetch, x.dependent.alone.trigger) for x in layer(2) if x.dependent.alone}
    assert chain == {
        "expert_gate_up": (("L2.w.shared_gate_up",), "waited"),
        "expert_down": (("L2.chosen", "L2.w.expert_down", "L2.mix", "L2.w.shared_down"), "early"),
    }


@pytest.mark.parametrize(
    "chain",
    [DependentLaunch(trigger="late"), DependentLaunch(prefetch=False), DependentLaunch(ahead=())],
    ids=["trigger", "prefetch", "ahead"],
)
def test_the_chain_has_the_options_given(chain):
    got = run_pipeline(baseline("tiny-flint"), [*JOINING, chain, SplitArrivals(chain=chain)])
    own = {x.ops: x.dependent for x in got.graph.launches}
    default = {x.ops: x.dependent for x in chained_and_cut("tiny-flint")[1].launches}
    assert own.keys() == default.keys() and own != default
    assert own == {x.ops: x.dependent for x in chain.apply(got.graph)[0].launches}
    assert {d.trigger for d in list(own.values())[1:]} == {chain.trigger}
    assert any(d.prefetch for d in own.values()) == chain.prefetch
    assert any(d.alone for d in own.values()) == (chain.prefetch and bool(chain.ahead))


@pytest.mark.parametrize(
    ("names", "disabled"),
    [(["split-arrivals"], ()), ([*JOINING, "split-arrivals"], ()), (NAMES, ["dependent-launch"])],
)
def test_launches_that_are_not_chained_stay_whole(names, disabled):
    before, after = run_pipeline(baseline("tiny-flint"), names, disabled).steps[-2:]
    assert after.name == "split-arrivals" and after.graph is before.graph
    assert not after.matched
    for count in after.matches:
        assert sum(count.refused.values()) == count.tried == count.refused["it is not chained to the launch before"]


def test_what_is_counted():
    run = pipeline("tiny-flint")
    layers = {role: sum(x.role == role for x in run.steps[-2].graph.launches) for role in ROLES}
    assert layers == {"qkv": 6, "attention": 6, "route": 4}
    assert {c.rule: c.matched for c in run.steps[-1].matches} == {f"{r} at its arrival": n for r, n in layers.items()}
    assert len(run.graph.launches) - len(run.steps[-2].graph.launches) == sum(layers.values())


def test_cutting_twice_changes_nothing():
    for spec, weights in (("flint", "bf16"), ("flint", "nvfp4"), ("tiny-flint", "bf16"), (OTHER, "bf16")):
        graph = chained_and_cut(spec, weights)[1]
        again, counts = SplitArrivals().apply(graph)
        assert again.launches == graph.launches
        assert sum(count.matched for count in counts) == 0
        assert run_pipeline(graph, ["dependent-launch", "split-arrivals"]).graph.launches == graph.launches


def routed(*, add):
    """[add ->] norm -> router -> top-k, the normed row read besides."""
    s = Sketch()
    for name in ("x", "r"):
        s.given(name, "bf16", "B", 64)
    s.given("seqs", "i32", "B")
    s.weight("w.norm", "f32", 64)
    s.weight("w.router", "f32", 8, 64)
    if add:
        s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum" if add else "x", "w.norm"], "h", eps=EPS)
    s.op("router", "router", ["h", "w.router"], "logits")
    s.op("choose", "topk", ["logits", "seqs"], "ids mix", k=3)
    return s


def cut(graph, *names):
    return run_pipeline(graph, [*names, "dependent-launch", "split-arrivals"]).graph


def test_a_route_that_adds_nothing():
    got = cut(routed(add=False).graph("h", "ids", "mix"), "router-expert-gemv")
    assert partition(got) == "route(norm router) | choose"
    assert [(x.name, x.role) for x in got.launches] == [("route", "route"), ("topk", "topk")]
    assert crossings(got, "route") == {"h": "recompute"}


def test_a_route_that_adds():
    got = cut(routed(add=True).graph("h", "ids", "mix", "residual"), "router-expert-gemv")
    assert partition(got) == "route(add norm router) | choose"
    assert crossings(got, "route") == {"sum": "local", "h": "recompute"}


@pytest.mark.parametrize(
    ("one", "role"), [("norm-rope-cache", "qkv"), ("attention-merge", "attention"), ("router-expert-gemv", "route")]
)
def test_what_one_pass_joined_is_cut_without_the_others(one, role):
    run = run_pipeline(baseline("tiny-flint"), NAMES, disabled=[name for name in JOINING if name != one])
    chained, graph = run.steps[-2].graph, run.graph
    assert arriving_roles(chained) == {role}
    assert arrivals(graph) == []
    assert {r for r in ROLES[role] if not any(x.role == r for x in graph.launches)} == set()


def attend(s, n):
    """One more attention over the same cache."""
    read = ["q", "cache", "positions", "seqs", "table"]
    s.op(f"partial{n}", "attention_partial", read, f"o{n} m{n} l{n}", scale=0.5 / n, chunk=16, partials=3)
    merged = [f"o{n}", f"m{n}", f"l{n}", "positions", "seqs"]
    s.op(f"merge{n}", "attention_merge", merged, f"a{n}", chunk=16, partials=3)


def test_halves_of_like_launches_are_named_apart():
    """Three attentions in one layer, or in none."""
    s = Sketch()
    s.given("q", "bf16", "B", 4, 16)
    s.cached()
    for n in (1, 2, 3):
        attend(s, n)
    got = cut(s.graph("a1", "a2", "a3"), "attention-merge")
    assert partition(got) == "partial1 | merge1 | partial2 | merge2 | partial3 | merge3"
    assert len({x.name for x in got.launches}) == 6


def test_a_half_is_not_named_like_another_launch():
    s = routed(add=False)
    s.weight("w", "f32", 64)
    s.op("topk", "norm", ["h", "w"], "h2", eps=EPS)
    got = cut(s.graph("h", "h2", "ids", "mix"), "router-expert-gemv")
    assert partition(got) == "route(norm router) | choose | topk"
    assert len({x.name for x in got.launches}) == 3


def test_random_graphs_stay_sound():
    """Each is verified, has no arrival left, and is cut once for all; most have something to cut."""
    matched = Counter()
    for seed in range(150):
        run = run_pipeline(grow(random.Random(seed).randrange, 12), NAMES)
        verify(run.graph)
        assert arrivals(run.graph) == []
        assert SplitArrivals().apply(run.graph)[0].launches == run.graph.launches
        for count in run.steps[-1].matches:
            matched[count.rule] += count.matched
    assert all(matched[f"{role} at its arrival"] >= 20 for role in ROLES)
