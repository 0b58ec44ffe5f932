"""What holds of the pipeline on any legal graph."""

import random
from collections import Counter
from itertools import islice, pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import grow

from flintc.ir.cost import decode_env, graph_cost
from flintc.ir.printer import to_text
from flintc.passes import PASSES, run_pipeline
from flintc.passes.split_arrivals import ROLES

NAMES = list(PASSES)
*JOINING, CHAIN, CUT = NAMES


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


def check_step(step_before, step_after):
    before, after = step_before.graph, step_after.graph
    assert after.ops == before.ops and after.values == before.values and after.outputs == before.outputs
    assert Counter(o for x in after.launches for o in x.ops) == Counter(dict.fromkeys(after.ops, 1))
    at = position(after)
    for op in after.ops.values():
        for v in op.inputs:
            if v in after.producers:
                assert at[after.producers[v]] < at[op.name]
    assert {(x.name, c.value) for x in after.launches for c in x.crossings} == inner_values(after)
    if step_after.name == CUT:
        check_cut(before, after)
    else:
        check_coarser(before, after)


def check_coarser(before, after):
    assert len(after.launches) <= len(before.launches)
    held = {frozenset(x.ops) for x in after.launches}
    for x in before.launches:
        assert any(frozenset(x.ops) <= ops for ops in held)


def check_cut(before, after):
    """Each launch with a last arriver, and no other, is two in its place."""
    whole = iter(after.launches)
    for x in before.launches:
        halves = 1 + any(c.kind == "last-arriver" for c in x.crossings)
        assert sorted(o for y in islice(whole, halves) for o in y.ops) == sorted(x.ops)
    assert next(whole, None) is None


@bounded
@given(legal_graphs())
def test_every_prefix_keeps_the_ops_and_only_coarsens_the_partition_until_it_is_cut(graph):
    steps = run_pipeline(graph, NAMES).steps
    for before, after in pairwise(steps):
        check_step(before, after)


@st.composite
def disabled_passes(draw):
    """Any of them; without the chain nothing is cut."""
    disabled = draw(st.sets(st.sampled_from(NAMES)))
    return disabled | {CUT} if CHAIN in disabled else disabled


@bounded
@given(legal_graphs(), st.permutations(JOINING), disabled_passes())
def test_passes_that_join_launches_run_in_any_order_and_subset(graph, order, disabled):
    steps = run_pipeline(graph, [*order, CHAIN, CUT], disabled).steps
    for before, after in pairwise(steps):
        check_step(before, after)


@bounded
@given(legal_graphs(), st.integers(1, 100), st.integers(1, 8))
def test_fusing_never_moves_more_bytes_and_never_asks_for_other_arithmetic(graph, context, batch):
    env = decode_env(graph, context, batch)
    costs = [graph_cost(step.graph, env) for step in run_pipeline(graph, NAMES, stop_after=CHAIN).steps]
    for before, after in pairwise(costs):
        assert after.bytes_read <= before.bytes_read and after.bytes_written <= before.bytes_written
        assert after.flops == before.flops
        assert after.redundancy >= 1


@bounded
@given(legal_graphs(), st.integers(1, 100), st.integers(1, 8))
def test_cutting_at_an_arrival_reads_twice_only_what_both_halves_need(graph, context, batch):
    """What arrives was in memory before, so a cut adds no byte of it; nor is anything done more or less often."""
    env = decode_env(graph, context, batch)
    before, after = (step.graph for step in run_pipeline(graph, NAMES).steps[-2:])
    then, now = graph_cost(before, env), graph_cost(after, env)
    assert (now.bytes_written, now.flops, now.executed) == (then.bytes_written, then.flops, then.executed)
    halves = [[after.launch_of[x.ops[0]], after.launch_of[x.ops[-1]]] for x in before.launches]
    twice = [after.values[v] for a, b in halves if a is not b for v in after.reads(b) if v in after.reads(a)]
    assert {v.name for v in twice} <= {"positions", "seqs"}
    assert now.bytes_read == then.bytes_read + sum(v.type.nbytes(env) for v in twice)


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
    rules += [f"{role} at its arrival" for role in ROLES]
    assert [rule for rule in rules if not matched[rule]] == []
    assert sum(refused.values()) > 100
