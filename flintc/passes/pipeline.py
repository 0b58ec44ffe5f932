"""The pipeline: passes by name, run in order, each verified, timed, counted, and open to inspection."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from flintc.errors import PassError, VerificationError
from flintc.ir.graph import Graph
from flintc.ir.printer import to_text
from flintc.ir.verify import verify
from flintc.passes.attention_merge import AttentionMerge
from flintc.passes.base import Pass
from flintc.passes.combine_gemv import CombineGemv
from flintc.passes.dependent_launch import DependentLaunch
from flintc.passes.norm_rope_cache import NormRopeCache
from flintc.passes.residual_norm import ResidualNorm
from flintc.passes.router_expert_gemv import RouterExpertGemv
from flintc.passes.rule import RuleCount
from flintc.passes.split_arrivals import SplitArrivals

#: What the graph before the first pass is called.
BASELINE = "baseline"

#: Every pass, in the order a pipeline runs them.
PASSES: Mapping[str, Pass] = {
    p.name: p
    for p in (
        ResidualNorm(),
        NormRopeCache(),
        AttentionMerge(),
        RouterExpertGemv(),
        CombineGemv(),
        DependentLaunch(),
        SplitArrivals(),
    )
}


@dataclass(frozen=True)
class Step:
    """The graph after one pass; ``number`` counts from 0, the baseline."""

    number: int
    name: str
    graph: Graph
    matches: tuple[RuleCount, ...]
    seconds: float

    @property
    def matched(self) -> int:
        """Matches of all rules."""
        return sum(count.matched for count in self.matches)


@dataclass(frozen=True)
class PipelineRun:
    """Every prefix of a pipeline: ``steps[0]`` is the baseline, ``steps[i]`` the graph after the i-th pass."""

    steps: tuple[Step, ...]

    @property
    def graph(self) -> Graph:
        """The graph after the last pass that ran."""
        return self.steps[-1].graph


def run_pipeline(
    graph: Graph,
    names: Sequence[str | Pass],
    disabled: Collection[str] = (),
    stop_after: str | None = None,
    print_after: Callable[[Step, str], None] | None = None,
) -> PipelineRun:
    """Run the passes ``names`` (or passes themselves, with other options) over ``graph``, but for those ``disabled``.

    The graph is verified before the first pass and after each, and no pass may change an op. ``stop_after`` names the
    last pass to run, or ``baseline``. ``print_after`` is called with each step and its text. PassError: an unknown
    name, a pass named twice, one that needs a pass which does not run before it, or one that must be the last and is
    not. VerificationError: a pass broke the graph.
    """
    passes = _chosen(names, disabled, stop_after)
    verify(graph)
    steps = [Step(0, BASELINE, graph, (), 0.0)]
    _show(steps[0], print_after)
    for number, p in enumerate(passes, start=1):
        start = time.perf_counter()
        before = graph
        graph, counts = p.apply(graph)
        _need_untouched(p, before, graph)
        verify(graph)
        steps.append(Step(number, p.name, graph, counts, time.perf_counter() - start))
        _show(steps[-1], print_after)
    return PipelineRun(tuple(steps))


def find_pass(name: str, known: Mapping[str, Pass] = PASSES) -> Pass:
    """The pass of this name; PassError names the nearest one."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise PassError(
        f"unknown pass {name!r}", remedy=f"did you mean {near[0]!r}?" if near else f"passes: {', '.join(known)}"
    )


def _chosen(names: Sequence[str | Pass], disabled: Collection[str], stop_after: str | None) -> list[Pass]:
    """The passes to run, in order, after checking every name and every requirement."""
    pipeline = [p if isinstance(p, Pass) else find_pass(p) for p in names]
    known = {**PASSES, **{p.name: p for p in pipeline}}
    in_pipeline = [p.name for p in pipeline]
    for name in in_pipeline:
        if in_pipeline.count(name) > 1:
            raise PassError(f"pass {name!r} is in the pipeline twice")
    for name in disabled:
        find_pass(name, known)
    if stop_after not in (None, BASELINE):
        find_pass(stop_after, known)
        _need_running(stop_after, in_pipeline, disabled)
    if stop_after is not None:
        pipeline = pipeline[: 0 if stop_after == BASELINE else in_pipeline.index(stop_after) + 1]
    running = [p for p in pipeline if p.name not in disabled]
    for i, p in enumerate(running):
        _need_required(p, {q.name for q in running[:i]})
        following = [q.name for q in running[i + 1 :] if p.name not in q.keeps]
        if p.last and following:
            raise PassError(f"pass {p.name!r} must be the last, but {following[0]!r} follows it")
    return running


def _need_untouched(p: Pass, before: Graph, after: Graph) -> None:
    """VerificationError where a pass changed what is computed, not only what shares a launch."""
    for old, new, what in ((before.ops, after.ops, "op"), (before.values, after.values, "value")):
        changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if changed:
            raise VerificationError(
                f"pass {p.name!r} changed the {what} {changed[0]}: passes only say what shares a launch"
            )
    if before.outputs != after.outputs:
        raise VerificationError(f"pass {p.name!r} changed the outputs: passes only say what shares a launch")


def _need_running(name: str, in_pipeline: Sequence[str], disabled: Collection[str]) -> None:
    if name in disabled:
        raise PassError(f"cannot stop after {name!r}: it is disabled")
    if name not in in_pipeline:
        raise PassError(f"cannot stop after {name!r}: it is not in the pipeline", remedy=", ".join(in_pipeline))


def _need_required(p: Pass, before: Collection[str]) -> None:
    for name in p.requires:
        if name not in before:
            raise PassError(f"pass {p.name!r} needs {name!r} before it", remedy=f"disable {p.name!r} as well")


def _show(step: Step, print_after: Callable[[Step, str], None] | None) -> None:
    if print_after is not None:
        print_after(step, to_text(step.graph))
