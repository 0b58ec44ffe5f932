"""Pass 6: what each launch of a real graph may fetch before the launches before it have finished."""

from dataclasses import replace

import pytest
from graphs import OTHER, baseline, pipeline

from flintc.errors import VerificationError
from flintc.ir.verify import verify
from flintc.passes import PASSES, run_pipeline
from flintc.passes.dependent_launch import DependentLaunch

NAME = "dependent-launch"
JOINING = [name for name in PASSES if name not in (NAME, "split-arrivals")]


def before_and_after(spec="tiny-flint"):
    """The graphs around the pass."""
    steps = pipeline(spec).steps
    (at,) = (i for i, step in enumerate(steps) if step.name == NAME)
    return steps[at - 1].graph, steps[at].graph


def chained(spec="tiny-flint"):
    return before_and_after(spec)[1]


def launches(spec="tiny-flint", layer=2):
    return {x.role: x for x in chained(spec).layer_launches(layer)}


@pytest.mark.parametrize("spec", ["tiny-flint", OTHER])
def test_no_launch_fewer_and_every_one_chained(spec):
    before, after = before_and_after(spec)
    assert [(x.name, x.ops, x.crossings) for x in after.launches] == [
        (x.name, x.ops, x.crossings) for x in before.launches
    ]
    assert all(x.dependent is not None for x in after.launches)


def test_what_a_moe_layer_fetches():
    fetched = {role: x.dependent.prefetch for role, x in launches().items()}
    assert fetched == {
        "add_norm": ("L2.w.input_norm",),
        "qkv": ("L2.w.qkv", "L2.w.q_norm", "L2.w.k_norm", "rope_table"),
        "attention": ("L2.cache.1", "L2.w.sinks"),
        "linear": ("L2.w.o",),
        "route": ("L2.w.mlp_norm", "L2.w.router"),
        # Experts are chosen within the step: only the shared one is known before the wait.
        "expert_gate_up": ("L2.w.shared_gate_up",),
        "expert_down": ("L2.w.shared_down",),
    }


def test_one_row_fetches_its_experts_as_soon_as_they_are_chosen():
    """They were chosen before the launch before, which for that triggers once it has waited for the choice."""
    by_role = {role: x.dependent.alone for role, x in launches().items()}
    chain = {role: alone and (alone.prefetch, alone.trigger) for role, alone in by_role.items()}
    assert chain.pop("expert_gate_up") == (("L2.w.shared_gate_up",), "waited")
    assert chain.pop("expert_down") == (("L2.chosen", "L2.w.expert_down", "L2.mix", "L2.w.shared_down"), "early")
    assert set(chain.values()) == {None}


@pytest.mark.parametrize("trigger", ["early", "waited", "late"])
def test_what_the_launch_before_does_not_wait_for_may_not_be_fetched(trigger):
    graph = chained()
    changed = [
        replace(x, dependent=replace(x.dependent, alone=replace(x.dependent.alone, trigger=trigger)))
        if x.name == "L2.expert_gate_up"
        else x
        for x in graph.launches
    ]
    broken = graph.with_launches(tuple(changed))
    if trigger != "early":
        verify(broken)
        return
    with pytest.raises(
        VerificationError, match=r"L2\.chosen may not be prefetched: this step may still be to write it"
    ):
        verify(broken)


def test_a_choice_that_the_launch_before_makes_is_not_fetched_ahead():
    """Routed experts' first product follows the choice at once."""
    got = run_pipeline(baseline("tiny-flint"), [*JOINING, DependentLaunch(ahead=("expert_gate_up",))]).graph
    assert all(x.dependent.alone is None for x in got.launches)


def test_nothing_made_in_the_step_is_fetched_but_older_pages_of_a_cache():
    graph = chained()
    kinds = {graph.values[v].kind for x in graph.launches for v in x.dependent.prefetch}
    assert kinds == {"weight", "table", "cache"}
    for launch in graph.launches:
        caches = [v for v in launch.dependent.prefetch if graph.values[v].kind == "cache"]
        assert bool(caches) == (launch.role == "attention")


def test_the_first_launch_triggers_last():
    """Positions and block tables may be written by the launch before the step; the rest read them before waiting."""
    first, *rest = chained().launches
    assert (first.dependent.prefetch, first.dependent.trigger) == ((), "late")
    assert {x.dependent.trigger for x in rest} == {"early"}


def test_options():
    got = run_pipeline(baseline("tiny-flint"), [DependentLaunch(trigger="late", prefetch=False)]).graph
    assert {(x.dependent.prefetch, x.dependent.trigger) for x in got.launches} == {((), "late")}


def test_it_chains_the_unfused_graph_too():
    got = run_pipeline(baseline("tiny-flint"), list(PASSES), disabled=JOINING, stop_after=NAME).graph
    assert all(x.dependent is not None for x in got.launches)
    assert len(got.launches) == len(baseline("tiny-flint").launches)
