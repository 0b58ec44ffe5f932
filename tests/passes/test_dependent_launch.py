"""Pass 6: what each launch of a real graph may fetch before the launches before it have finished."""

import pytest
from graphs import OTHER, baseline, pipeline

from flintc.passes import PASSES, run_pipeline
from flintc.passes.dependent_launch import DependentLaunch


def launches(spec="tiny-flint", layer=2):
    return {x.role: x for x in pipeline(spec).graph.layer_launches(layer)}


@pytest.mark.parametrize("spec", ["tiny-flint", OTHER])
def test_no_launch_fewer_and_every_one_chained(spec):
    before, after = pipeline(spec).steps[-2].graph, pipeline(spec).graph
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


def test_nothing_made_in_the_step_is_fetched_but_older_pages_of_a_cache():
    graph = pipeline("tiny-flint").graph
    kinds = {graph.values[v].kind for x in graph.launches for v in x.dependent.prefetch}
    assert kinds == {"weight", "table", "cache"}
    for launch in graph.launches:
        caches = [v for v in launch.dependent.prefetch if graph.values[v].kind == "cache"]
        assert bool(caches) == (launch.role == "attention")


def test_the_first_launch_triggers_last():
    """Positions and block tables may be written by the launch before the step; the rest read them before waiting."""
    first, *rest = pipeline("tiny-flint").graph.launches
    assert (first.dependent.prefetch, first.dependent.trigger) == ((), "late")
    assert {x.dependent.trigger for x in rest} == {"early"}


def test_options():
    got = run_pipeline(baseline("tiny-flint"), [DependentLaunch(trigger="late", prefetch=False)]).graph
    assert {(x.dependent.prefetch, x.dependent.trigger) for x in got.launches} == {((), "late")}


def test_it_chains_the_unfused_graph_too():
    got = run_pipeline(baseline("tiny-flint"), list(PASSES), disabled=list(PASSES)[:-1]).graph
    assert len(got.launches) == len(baseline("tiny-flint").launches)
