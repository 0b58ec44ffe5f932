"""Instructions of a compiled kernel, and how often a program may have waited before each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Stands for every number of waits above one.
MANY = 2


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``guard`` is the predicate that it is done under, empty if always."""

    opcode: str
    operands: str
    guard: str = ""

    @property
    def operation(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Listing:
    """Instructions in order; ``labels`` maps names to the instruction that follows them."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


#: What may come after an instruction: its targets, and whether the next one may.
Continues = Callable[[Instruction], tuple[Sequence[str], bool]]


def following(listing: Listing, continues: Continues) -> list[list[int]]:
    """Instructions that may come after each; the end of the listing is no instruction."""
    result = []
    for index, instruction in enumerate(listing.instructions):
        targets, falls_through = continues(instruction)
        after = [listing.labels[target] for target in targets]
        if falls_through and index + 1 < len(listing.instructions):
            after.append(index + 1)
        result.append([i for i in after if i < len(listing.instructions)])
    return result


def waits_before(after: Sequence[Sequence[int]], waits: frozenset[int]) -> list[frozenset[int]]:
    """Numbers of waits that a program may have executed when it comes to each instruction; none if it never does."""
    found: list[set[int]] = [set() for _ in after]
    pending = [(0, 0)] if after else []
    while pending:
        index, count = pending.pop()
        if count in found[index]:
            continue
        found[index].add(count)
        then = min(MANY, count + (index in waits))
        pending += [(i, then) for i in after[index]]
    return [frozenset(f) for f in found]
