"""The runner: order, counts, names, requirements; and the pipeline over whole specs."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar

import pytest
from golden import check_golden
from graphs import OTHER, baseline, partition, pipeline

from flintc.errors import PassError, VerificationError
from flintc.ir.printer import to_text
from flintc.ir.verify import verify
from flintc.passes import PASSES, Pass, run_pipeline
from flintc.passes.rule import RuleCount
from flintc.spec import KNOWN_PASSES, load_spec

NAMES = list(PASSES)
*JOINING, CHAIN, CUT = NAMES
#: Roles of a MoE layer after its first norm, once cut.
CUT_MOE = "linear heads attention_partial attention_merge linear route topk expert_gate_up expert_down"
SPECS = ["flint", "tiny-flint", OTHER]


@dataclass(frozen=True)
class Nothing(Pass):
    """Changes nothing, but wants the qkv launches."""

    name: ClassVar[str] = "nothing"
    requires: ClassVar[tuple[str, ...]] = ("norm-rope-cache",)

    def apply(self, graph):
        return graph, (RuleCount("nothing"),)


@dataclass(frozen=True)
class Follower(Nothing):
    """Changes nothing, and may follow the pass that chains launches."""

    name: ClassVar[str] = "follower"
    requires: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[tuple[str, ...]] = (CHAIN,)


@dataclass(frozen=True)
class Vandal(Pass):
    """Loses a launch."""

    name: ClassVar[str] = "vandal"

    def apply(self, graph):
        return graph.with_launches(graph.launches[1:]), ()


@dataclass(frozen=True)
class Forger(Pass):
    """Changes an op into one that is just as legal."""

    name: ClassVar[str] = "forger"

    def apply(self, graph):
        op = next(o for o in graph.ops.values() if o.kind == "norm")
        return replace(graph, ops={**graph.ops, op.name: replace(op, attrs={"eps": 1e-3})}), ()


def after(name, spec, weights="bf16"):
    """The graph after the pass ``name``."""
    return next(step.graph for step in pipeline(spec, weights).steps if step.name == name)


def roles(graph, layer):
    return " ".join(x.role for x in graph.layer_launches(layer))


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_flint_is_joined_to_seven_launches_a_layer_and_345_in_all(weights):
    graph = run_pipeline(baseline("flint", weights), NAMES, stop_after="dependent-launch").graph
    assert {len(graph.layer_launches(layer)) for layer in graph.layers()} == {7}
    assert (len(graph.body), len(graph.launches)) == (345, 346)


@pytest.mark.parametrize(
    ("weights", "moe", "dense", "in_all"),
    # In BF16 the product of qkv is left whole.
    [("nvfp4", 10, 9, 490), ("bf16", 9, 8, 441)],
)
def test_flint_is_cut_where_programs_wait_for_others(weights, moe, dense, in_all):
    graph = pipeline("flint", weights).graph
    assert [len(graph.layer_launches(layer)) for layer in graph.layers()] == [dense] * 2 + [moe] * 47
    assert (len(graph.body), len(graph.launches)) == (in_all, in_all + 1)


def test_flint_after_each_pass():
    """22, 21, 13 and 14 launches a layer, less what each pass is said to join, and more by what the last cuts."""
    run = pipeline("flint", "nvfp4")
    counts = [[len(step.graph.layer_launches(layer)) for layer in (2, 5, 0, 1)] for step in run.steps]
    assert counts == [
        [22, 21, 13, 14],
        [20, 19, 12, 12],
        [16, 16, 9, 9],
        [15, 15, 8, 8],
        [10, 10, 8, 8],
        [7, 7, 7, 7],
        [7, 7, 7, 7],
        [10, 10, 9, 9],
    ]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (0, "norm qkv attention linear add_norm gate_up linear"),
        (1, "add_norm qkv attention linear add_norm gate_up linear"),
        (2, "add_norm qkv attention linear route expert_gate_up expert_down"),
        (48, "add_norm qkv attention linear route expert_gate_up expert_down"),
    ],
)
def test_roles_of_flint_layers(layer, expected):
    assert roles(after(CHAIN, "flint"), layer) == expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (0, "norm linear heads attention_partial attention_merge linear add_norm gate_up linear"),
        (1, "add_norm linear heads attention_partial attention_merge linear add_norm gate_up linear"),
        *((n, f"add_norm {CUT_MOE}") for n in (2, 5, 48)),
    ],
)
def test_roles_of_flint_layers_once_cut(layer, expected):
    assert roles(after(CUT, "flint", "nvfp4"), layer) == expected


def test_a_model_without_shared_expert_whose_first_layer_routes():
    graph = after(CHAIN, OTHER)
    assert roles(graph, 0) == "norm qkv attention linear route expert_gate_up expert_down"
    assert {len(graph.layer_launches(layer)) for layer in graph.layers()} == {7}
    cut = after(CUT, OTHER)
    assert roles(cut, 0) == f"norm {CUT_MOE}"
    assert {len(cut.layer_launches(layer)) for layer in cut.layers()} == {10}


@pytest.mark.parametrize("spec", SPECS)
def test_ops_are_the_same_objects_at_every_step(spec):
    run = pipeline(spec)
    for step in run.steps:
        assert step.graph.ops is run.steps[0].graph.ops
        assert step.graph.values is run.steps[0].graph.values


@pytest.mark.parametrize("spec", ["tiny-flint", OTHER])
def test_every_subset_of_the_pipeline_runs(spec):
    graph = baseline(spec)
    for n in range(len(NAMES)):
        for disabled in combinations(NAMES, n):
            run = run_pipeline(graph, NAMES, disabled)
            assert [s.name for s in run.steps[1:]] == [name for name in NAMES if name not in disabled]


def test_disabling_a_pass_leaves_its_launches_apart():
    graph = run_pipeline(baseline("flint"), NAMES, ["attention-merge"], stop_after=CHAIN).graph
    assert {len(graph.layer_launches(layer)) for layer in graph.layers()} == {8}


def test_disabling_the_pass_that_cuts_leaves_launches_joined():
    graph = run_pipeline(baseline("flint"), NAMES, [CUT]).graph
    assert graph.launches == after(CHAIN, "flint").launches


def test_launches_that_are_cut_in_the_end_need_not_have_been_joined():
    """The partials and their merge, of the two halves of a cut the one that is a launch per op to begin with."""
    graph = run_pipeline(baseline("tiny-flint"), NAMES, ["attention-merge"]).graph
    assert partition(graph) == partition(pipeline("tiny-flint").graph)


def test_steps_are_numbered_timed_and_counted():
    run = pipeline("tiny-flint")
    assert [(s.number, s.name) for s in run.steps] == list(enumerate(["baseline", *NAMES]))
    assert run.steps[0].seconds == 0 and all(s.seconds > 0 for s in run.steps[1:])
    qkv = run.steps[2].matches
    assert [(c.rule, c.matched) for c in qkv] == [("qkv+norm+rope+write", 3), ("qkv+norm+write", 3)]
    assert all(c.tried >= c.matched for s in run.steps for c in s.matches)


@pytest.mark.parametrize("stop", ["baseline", *NAMES])
def test_stop_after(stop):
    run = run_pipeline(baseline("tiny-flint"), NAMES, stop_after=stop)
    assert run.steps[-1].name == stop
    assert partition(run.graph) == partition(pipeline("tiny-flint").steps[len(run.steps) - 1].graph)


def test_print_after_is_called_with_each_step():
    seen = []
    run_pipeline(baseline("tiny-flint"), NAMES[:2], print_after=lambda step, text: seen.append((step.name, text)))
    assert [name for name, _ in seen] == ["baseline", *NAMES[:2]]
    assert seen[1][1] == to_text(pipeline("tiny-flint").steps[1].graph)


def test_running_the_pipeline_again_changes_nothing():
    graph = after(CHAIN, "tiny-flint")
    assert run_pipeline(graph, NAMES, stop_after=CHAIN).graph.launches == graph.launches
    assert run_pipeline(graph, NAMES).graph.launches == pipeline("tiny-flint").graph.launches


@pytest.mark.parametrize(
    ("names", "disabled", "stop", "message"),
    [
        (["residual-nrom"], (), None, "unknown pass 'residual-nrom' (did you mean 'residual-norm'?)"),
        (["zzz"], (), None, f"unknown pass 'zzz' (passes: {', '.join(NAMES)})"),
        (NAMES, ["combine"], None, "unknown pass 'combine' (did you mean 'combine-gemv'?)"),
        (NAMES, (), "attention", "unknown pass 'attention' (did you mean 'attention-merge'?)"),
        (NAMES, ["attention-merge"], "attention-merge", "cannot stop after 'attention-merge': it is disabled"),
        (
            NAMES[:2],
            (),
            NAMES[3],
            f"cannot stop after {NAMES[3]!r}: it is not in the pipeline ({', '.join(NAMES[:2])})",
        ),
        ([*NAMES, NAMES[0]], (), None, "pass 'residual-norm' is in the pipeline twice"),
        (
            ["residual-norm", "dependent-launch", "attention-merge"],
            (),
            None,
            "pass 'dependent-launch' must be the last, but 'attention-merge' follows it",
        ),
        (
            ["residual-norm", "dependent-launch", "split-arrivals", "attention-merge"],
            (),
            None,
            "pass 'dependent-launch' must be the last, but 'attention-merge' follows it",
        ),
        ([*NAMES, Follower()], (), None, "pass 'split-arrivals' must be the last, but 'follower' follows it"),
        ([Nothing()], (), None, "pass 'nothing' needs 'norm-rope-cache' before it (disable 'nothing' as well)"),
        ([Nothing(), *NAMES], (), None, "pass 'nothing' needs 'norm-rope-cache' before it (disable 'nothing' as well)"),
        (
            [*JOINING, Nothing()],
            ["norm-rope-cache"],
            None,
            "pass 'nothing' needs 'norm-rope-cache' before it (disable 'nothing' as well)",
        ),
    ],
)
def test_refused_pipelines(names, disabled, stop, message):
    with pytest.raises(PassError) as error:
        run_pipeline(baseline("tiny-flint"), names, disabled, stop)
    assert str(error.value) == message
    assert error.value.exit_code == 2


def test_a_pass_that_needs_another_runs_after_it():
    run = run_pipeline(baseline("tiny-flint"), [*JOINING, Nothing()])
    assert run.steps[-1].name == "nothing"


def test_a_pass_that_must_be_the_last_is_followed_by_those_that_keep_what_it_says():
    run = run_pipeline(baseline("tiny-flint"), [*JOINING, CHAIN, Follower()])
    assert [step.name for step in run.steps[-2:]] == [CHAIN, "follower"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Vandal(), "embed: the op is in no launch"),
        (Forger(), "pass 'forger' changed the op L0.norm: passes only say what shares a launch"),
    ],
)
def test_the_graph_is_verified_after_each_pass(bad, message):
    with pytest.raises(VerificationError, match=message):
        run_pipeline(baseline("tiny-flint"), [bad])


def test_specs_know_the_same_passes():
    assert tuple(KNOWN_PASSES) == tuple(PASSES)
    assert tuple(load_spec("flint").pipeline) == tuple(PASSES)


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_says_what_it_is_for(name):
    assert PASSES[name].name == name
    assert len(PASSES[name].doc) > 40
    for rule in getattr(PASSES[name], "rules", ()):
        assert len(rule.why) > 40


@pytest.mark.parametrize("step", [0, -2, -1], ids=["baseline", "joined", "final"])
def test_golden_ir(step):
    run = pipeline("tiny-flint")
    verify(run.steps[step].graph)
    check_golden(f"ir/tiny-flint.{run.steps[step].name}.txt", to_text(run.steps[step].graph))
