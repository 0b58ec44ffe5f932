"""What holds of the pipeline on any legal graph."""

import random
from collections import Counter
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import grow

from flintc.ir.cost import decode_env, graph_cost
from flintc.ir.printer import to_text
from flintc.passes import PASSES, run_pipeline

NAMES = list(PASSES)


@st.composite
def legal_graphs(draw):
    return grow(lambda n: draw(st.integers(0, n - 1)), draw(st.integers(1, 14)))


bounded = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def position(graph):
    return {o: (i, j) for i, x in enumerate(graph.launches) for j, o in enumerate(x.ops)}


def inner_values(graph):
    """(launch, value) for every value made and read in one launch, by brute force."""
    return {
        (x.name, v)
        for x in graph.launches
        for maker in x.ops
        for v in graph.ops[maker].outputs
        for reader in x.ops
        if v in graph.ops[reader].inputs
    }


def check_step(before, after):
    assert after.ops == before.ops and after.values == before.values and after.outputs == before.outputs
    assert Counter(o for x in after.launches for o in x.ops) == Counter(dict.fromkeys(after.ops, 1))
    assert len(after.launches) <= len(before.launches)
    at = position(after)
    for op in after.ops.values():
        for v in op.inputs:
            if v in after.producers:
                assert at[after.producers[v]] < at[op.name]
    assert {(x.name, c.value) for x in after.launches for c in x.crossings} == inner_values(after)
    held = {frozenset(x.ops) for x in after.launches}
    for x in before.launches:
        assert any(frozenset(x.ops) <= ops for ops in held)


@bounded
@given(legal_graphs())
def test_every_prefix_keeps_the_ops_and_only_coarsens_the_partition(graph):
    steps = run_pipeline(graph, NAMES).steps
    for before, after in pairwise(steps):
        check_step(before.graph, after.graph)


@bounded
@given(legal_graphs(), st.permutations(NAMES[:-1]), st.sets(st.sampled_from(NAMES)))
def test_passes_that_join_launches_run_in_any_order_and_subset(graph, order, disabled):
    steps = run_pipeline(graph, [*order, NAMES[-1]], disabled).steps
    for before, after in pairwise(steps):
        check_step(before.graph, after.graph)


@bounded
@given(legal_graphs(), st.integers(1, 100), st.integers(1, 8))
def test_fusing_never_moves_more_bytes_and_never_asks_for_other_arithmetic(graph, context, batch):
    env = decode_env(graph, context, batch)
    costs = [graph_cost(step.graph, env) for step in run_pipeline(graph, NAMES).steps]
    for before, after in pairwise(costs):
        assert after.bytes_read <= before.bytes_read and after.bytes_written <= before.bytes_written
        assert after.flops == before.flops
        assert after.redundancy >= 1


@bounded
@given(legal_graphs())
def test_any_graph_can_be_printed(graph):
    text = to_text(run_pipeline(graph, NAMES).graph)
    assert all(f"{v} {graph.values[v].type}" in text for op in graph.ops.values() for v in op.outputs)


def test_random_graphs_hold_what_every_rule_takes_and_refuses():
    """The properties above would hold of graphs in which nothing matches: these do match, and nearly match."""
    matched, refused = Counter(), Counter()
    for seed in range(150):
        graph = grow(random.Random(seed).randrange, 12)
        for step in run_pipeline(graph, NAMES).steps:
            for count in step.matches:
                matched[count.rule] += count.matched
                refused.update(count.refused)
    rules = [rule.name for p in PASSES.values() for rule in getattr(p, "rules", ())]
    assert [rule for rule in rules if not matched[rule]] == []
    assert sum(refused.values()) > 100
