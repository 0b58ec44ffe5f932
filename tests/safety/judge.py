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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from mutants_of_chain import CHAIN_KINDS
from mutants_of_memory import MEMORY_KINDS
from mutation import Mutant
from plan_programs import ROWS, Senseless, Translator
from sound_plans import drawn, sound_plans

from flintc.ir.plan import Plan
from flintc.safety import Hazard, find_hazards

KINDS = {**CHAIN_KINDS, **MEMORY_KINDS}

#: Kinds whose mutants are harmless more often than not: fewer of them are made.
MOSTLY_HARMLESS = frozenset({"duplicate-wait", "raise-wait", "attribute-alone", "drop-attribute", "share-counter"})
OFTEN_HARMLESS = frozenset({"move-trigger", "old-cache-version", "shrink-buffer"})

#: Roles of launches, of each kind of plan that is chained, that there must be unsafe mutants of.
REFUSED_IN = {
    "joined": ("qkv", "attention", "route"),
    "cut": ("linear", "heads", "attention_partial", "attention_merge", "route", "topk"),
}


@dataclass
class Tally:
    """Verdicts on the mutants of one kind."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: First rule named, of harmless mutants that were refused.
    explained: Counter[str] = field(default_factory=Counter)
    #: Unsafe mutants that were accepted; there must be none.
    accepted: list[str] = field(default_factory=list)
    #: Mutants by the kind of plan they were made from.
    made_from: Counter[str] = field(default_factory=Counter)
    #: Unsafe ones that concern one launch, by the kind of plan and that launch's role.
    roles: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def unsafe(self) -> int:
        """Mutants in which the machine met a hazard."""
        return self.counts["unsafe", "refused"] + self.counts["unsafe", "accepted"]


@cache
def translator(batch: int) -> Translator:
    """One translator a batch size, for what it keeps of the plans that mutants are made from."""
    return Translator(batch, [x.plan for x in sound_plans(batch)])


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
        base = drawn(batch, random)
        mutant = KINDS[kind](base.plan, random)
        if mutant is None:
            continue
        why = truth(mutant, batch, shuffles, random.randrange(1 << 30))
        record(tally, mutant, f"batch {batch}: {why}" if why else "", find_hazards(mutant.plan))
        tally.made_from[base.kind] += 1
        if why and len(mutant.touched) == 1:
            tally.roles[base.kind, _role(base.plan, mutant.touched[0])] += 1
    return tally


def _role(plan: Plan, index: int) -> str:
    """Role of the launch at ``index``; of none where the plan has ended."""
    names = [x.name for x in plan.launches[index : index + 1]]
    return next((x.role for x in plan.graph.launches if x.name in names), "")


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
        "| kind | the change | mutants | of cut plans | unsafe | of these accepted | safe, accepted | safe, refused "
        "| by rule |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    total, cut = Counter[tuple[str, str]](), 0
    for kind, tally in tallies:
        lines.append(_line(kind, tally.counts, tally.made_from["cut"], ", ".join(sorted(tally.explained))))
        total += tally.counts
        cut += tally.made_from["cut"]
    return "\n".join([*lines, _line("**all**", total, cut, "")])


def _line(kind: str, counts: Counter[tuple[str, str]], cut: int, rules: str) -> str:
    unsafe, missed = counts["unsafe", "refused"] + counts["unsafe", "accepted"], counts["unsafe", "accepted"]
    harmless = counts["safe", "accepted"], counts["safe", "refused"]
    change = (KINDS[kind].__doc__ or "").removesuffix(".") if kind in KINDS else ""
    figures = (counts.total(), cut, unsafe, missed, *harmless)
    return f"| {kind} | {change} | {' | '.join(map(str, figures))} | {rules} |"


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
