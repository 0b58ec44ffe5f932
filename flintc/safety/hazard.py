"""What the checker finds, and the rules it finds it by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RULES: Mapping[str, str] = {
    "launches": "the plan holds every launch of the graph once, with an argument for every parameter",
    "operands": "a launch reads every value that its ops read, writes every value they make, and no other",
    "attribute": "a launch has the dependent-launch attribute if and only if its kernel waits",
    "wait-once": "a kernel that waits does so exactly once on every path, in no loop and under no condition",
    "store-above-wait": "nothing is stored, and no counter touched, above the wait",
    "load-above-wait": "nothing is loaded above the wait that a launch still running may write",
    "order": "two launches that touch the same memory, one of them writing, are ordered by waits between them",
    "content": "memory holds the value that a launch reads when its turn comes, and the outputs at the end",
    "inside-launch": "programs of one launch share memory only through a counter's last arriver",
    "counter": "who arrives at a counter also has its last arriver put it back to zero; nothing else touches it",
    "padding": "pages of a sequence and weights of an expert are touched for rows that have one, and for no other",
    "ring": "a window's ring holds the window of every row of a step while the step's rows are being written",
    "capacity": "a buffer is laid out for every value that it holds",
}


@dataclass(frozen=True, slots=True)
class Hazard:
    """One broken rule. launch, value and place (buffer, cache, counter) are empty where none is concerned."""

    rule: str
    launch: str
    value: str
    place: str
    message: str

    def __str__(self) -> str:
        where = f"launch {self.launch}: " if self.launch else ""
        return f"{where}{self.message} (rule {self.rule}: {RULES[self.rule]})"
