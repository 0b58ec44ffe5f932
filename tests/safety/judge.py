"""Breaks plans in every way of ``mutants_of_*``, and holds the checker's verdict against the abstract machine's.

    python tests/safety/judge.py --mutants 2000 --seed 7

prints the table of ``docs/dependent-launch.md`` for as many mutants of each kind.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from graphs import baseline
from mutants_of_chain import CHAIN_KINDS
from mutants_of_memory import MEMORY_KINDS
from mutation import Mutant
from plan_programs import ROWS, Senseless, Translator

from flintc.codegen.planner import plan
from flintc.ir.plan import Plan
from flintc.passes import PASSES, run_pipeline
from flintc.safety import Hazard, find_hazards

SPECS = tuple(str(Path(__file__).parents[1] / "data" / name) for name in ("short-flint.yaml", "short-other.yaml"))
CHAIN = "dependent-launch"
KINDS = {**CHAIN_KINDS, **MEMORY_KINDS}

#: Kinds whose mutants are harmless more often than not: fewer of them are made.
MOSTLY_HARMLESS = frozenset({"duplicate-wait", "raise-wait", "attribute-alone", "drop-attribute", "share-counter"})
OFTEN_HARMLESS = frozenset({"move-trigger", "old-cache-version", "shrink-buffer"})


def base_plans(batch: int) -> tuple[Plan, ...]:
    """Every prefix of the pipeline of two short models, each with the launches chained and not, as ``batch`` rows run.

    The same objects for all batches of several rows.
    """
    return _one_row() if batch == 1 else _several_rows()


@cache
def _one_row() -> tuple[Plan, ...]:
    return tuple(as_run(made, 1) for made in whole_plans())


@cache
def _several_rows() -> tuple[Plan, ...]:
    return tuple(as_run(made, max(ROWS)) for made in whole_plans())


def as_run(whole: Plan, rows: int) -> Plan:
    """``whole`` with those kernels alone that steps of ``rows`` rows run on."""
    launches = tuple(replace(x, kernel=whole.kernel_for(x, rows).name) for x in whole.launches)
    kernels = {name: replace(kernel, several=None) for name, kernel in whole.kernels.items()}
    return replace(whole, kernels=kernels, launches=launches)


@cache
def whole_plans() -> tuple[Plan, ...]:
    """The plans of :func:`base_plans` with the kernels for every number of rows."""
    names = [name for name in PASSES if name != CHAIN]
    prefixes = [names[:count] for count in range(len(names) + 1)]
    return tuple(
        plan(run_pipeline(baseline(spec), [*prefix, *chain]).graph)
        for spec in SPECS
        for prefix in prefixes
        for chain in ((), (CHAIN,))
    )


@dataclass
class Tally:
    """Verdicts on the mutants of one kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: First rule named, of harmless mutants that were refused.
    explained: Counter[str] = field(default_factory=Counter)
    #: Unsafe mutants that were accepted; there must be none.
    accepted: list[str] = field(default_factory=list)

    @property
    def unsafe(self) -> int:
        """Mutants in which the machine met a hazard."""
        return self.counts["unsafe", "refused"] + self.counts["unsafe", "accepted"]


@cache
def translator(batch: int) -> Translator:
    """One translator a batch size, for what it keeps of the plans that mutants are made from."""
    return Translator(batch, base_plans(batch))


def truth(mutant: Mutant, batch: int, shuffles: int = 0, seed: int = 0) -> str:
    """What goes wrong when the machine runs ``mutant``; empty if nothing does."""
    try:
        machine = translator(batch).machine(mutant.plan)
    except Senseless as error:
        return str(error)
    first = [index + 1 for index in mutant.touched]  # the caller comes before the launches
    return machine.hazard(first, len(mutant.plan.launches) + 1, shuffles, seed)


def judge(kind: str, count: int, seed: int, shuffles: int = 0) -> Tally:
    """Judge ``count`` mutants of ``kind``."""
    random, tally = Random(f"{kind} {seed}"), Tally()
    while tally.counts.total() < count:
        batch = random.choice(list(ROWS))
        mutant = KINDS[kind](random.choice(base_plans(batch)), random)
        if mutant is None:
            continue
        why = truth(mutant, batch, shuffles, random.randrange(1 << 30))
        record(tally, mutant, f"batch {batch}: {why}" if why else "", find_hazards(mutant.plan))
    return tally


def record(tally: Tally, mutant: Mutant, why: str, hazards: Sequence[Hazard]) -> None:
    """Add one verdict."""
    tally.counts["unsafe" if why else "safe", "refused" if hazards else "accepted"] += 1
    if why and not hazards:
        tally.accepted.append(f"{mutant.what}: {why}")
    if hazards and not why:
        tally.explained[hazards[0].rule] += 1
        assert all(str(h) and h.rule for h in hazards)


def table(tallies: Iterable[tuple[str, Tally]]) -> str:
    """The tallies in Markdown."""
    lines = [
        "| kind | the change | mutants | unsafe | of these accepted | safe, accepted | safe, refused | by rule |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[tuple[str, str]] = Counter()
    for kind, tally in tallies:
        lines.append(_line(kind, tally.counts, ", ".join(sorted(tally.explained))))
        total += tally.counts
    return "\n".join([*lines, _line("**all**", total, "")])


def _line(kind: str, counts: Counter[tuple[str, str]], rules: str) -> str:
    unsafe, missed = counts["unsafe", "refused"] + counts["unsafe", "accepted"], counts["unsafe", "accepted"]
    harmless = counts["safe", "accepted"], counts["safe", "refused"]
    change = (KINDS[kind].__doc__ or "").removesuffix(".") if kind in KINDS else ""
    return f"| {kind} | {change} | {counts.total()} | {unsafe} | {missed} | {harmless[0]} | {harmless[1]} | {rules} |"


def share(kind: str, mutants: int) -> int:
    """How many mutants of ``kind`` to make where ``mutants`` are wanted of each."""
    return max(1, mutants // (10 if kind in MOSTLY_HARMLESS else 3 if kind in OFTEN_HARMLESS else 1))


def main() -> int:
    """Judge and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=250, help="mutants of each kind")
    parser.add_argument("--shuffles", type=int, default=0, help="random orders tried of each mutant besides")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin, tallies = time.perf_counter(), {}
    for kind in KINDS:
        tallies[kind] = judge(kind, share(kind, options.mutants), options.seed, options.shuffles)
    print(table(tallies.items()))
    accepted = [f"{kind}: {what}" for kind, tally in tallies.items() for what in tally.accepted]
    print(f"\n{time.perf_counter() - begin:.0f} s", *accepted, sep="\n")
    return 1 if accepted else 0


if __name__ == "__main__":
    sys.exit(main())
