"""What machine code does above its wait: the last word, after the assembler has scheduled every instruction.

Addresses are followed through the registers from the constant bank, where parameters lie, along every path to the wait.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flintc.codegen.listing import Instruction, Listing, following, waits_before
from flintc.errors import VerificationError

#: Where parameters begin in constant bank 0.
PARAM_BASE: Mapping[str, int] = {"sm_90": 0x210, "sm_100": 0x380}

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_CONSTANT = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_PREDICATE = re.compile(r"(?<![\w`])!?U?P\d")

#: Loads and stores of memory that other launches see. What is not named here touches none, or stops the lint.
_LOADS = frozenset({"LDG", "LD", "LDGSTS"})
_STORES = frozenset({"STG", "ST", "ATOM", "ATOMG", "RED", "REDG"})
_UNKNOWN = frozenset({"UBLKCP", "UBLKPF", "UTMALDG", "UTMASTG", "UTMAREDG", "LDGMC", "TLD", "SULD", "SUST"})
#: Operations whose first operand is no register written.
_NO_TARGET = _STORES | {"STS", "STL", "STSM", "LDGSTS", "BRA", "EXIT", "BAR", "CCTL", "NOP", "RET", "CALL"}

Taints = dict[str, frozenset[int]]


@dataclass(frozen=True)
class SassFlow:
    """Machine code of one kernel. ``offsets`` maps each address of the constant bank to a pointer parameter's name."""

    name: str
    listing: Listing
    offsets: Mapping[int, str]

    @cached_property
    def waits(self) -> frozenset[int]:
        """Instructions that wait for the launches before."""
        return self._all("ACQBULK")

    @cached_property
    def triggers(self) -> frozenset[int]:
        """Instructions that let the next launch start."""
        return self._all("PREEXIT")

    @cached_property
    def _after(self) -> list[list[int]]:
        return following(self.listing, _continues)

    @cached_property
    def waited(self) -> list[frozenset[int]]:
        """Per instruction, how often a program may have waited when it comes there."""
        return waits_before(self._after, self.waits)

    @property
    def waited_at_end(self) -> frozenset[int]:
        """How often a program may have waited when it ends."""
        ends = (i for i, x in enumerate(self.listing.instructions) if x.operation == "EXIT")
        return frozenset(count for i in ends for count in self.waited[i])

    def stores_above(self) -> list[str]:
        """Stores and atomics that a program may come to before it has waited."""
        return [x.opcode for i, x in self._above() if x.operation in _STORES]

    def loads_above(self) -> Mapping[str, int]:
        """Parameters loaded from before a program has waited, by how many instructions each.

        VerificationError where one cannot be told.
        """
        state = self._taints()
        found = Counter[str]()
        for index, instruction in self._above():
            if instruction.operation in _UNKNOWN:
                raise VerificationError(f"kernel {self.name}: cannot tell what {instruction.opcode} touches")
            if instruction.operation not in _LOADS:
                continue
            address = instruction.operands[instruction.operands.rindex("[") :]
            origins = frozenset().union(*(state[index].get(r, frozenset()) for r in _registers(address)))
            params = {self.offsets[o] for o in origins if o in self.offsets}
            if not params:
                raise VerificationError(f"kernel {self.name}: cannot tell what {instruction.operands} points into")
            found.update(params)
        return found

    def _all(self, operation: str) -> frozenset[int]:
        return frozenset(i for i, x in enumerate(self.listing.instructions) if x.operation == operation)

    def _above(self) -> Iterable[tuple[int, Instruction]]:
        return ((i, x) for i, x in enumerate(self.listing.instructions) if 0 in self.waited[i])

    def _taints(self) -> list[Taints]:
        """Per instruction above the wait, register -> addresses of the constant bank its value was made from."""
        state: list[Taints] = [{} for _ in self.listing.instructions]
        pending, seen = [0], set[int]()
        while pending:
            index = pending.pop()
            instruction = self.listing.instructions[index]
            if index in self.waits:
                continue
            result = _executed(instruction, state[index])
            for after in self._after[index]:
                merged = {
                    r: state[after].get(r, frozenset()) | result.get(r, frozenset())
                    for r in state[after].keys() | result.keys()
                }
                if merged != state[after] or after not in seen:
                    state[after] = merged
                    seen.add(after)
                    pending.append(after)
        return state


def parse_sass(name: str, text: str, params: Sequence[tuple[str, str]], target: str) -> SassFlow:
    """The kernel in a listing of nvdisasm; ``params`` are (name, type) of its parameters in order."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(instructions)
        elif match := _LINE.match(line):
            guard, opcode, operands = match.groups()
            instructions.append(Instruction(opcode, operands.strip(), guard or ""))
    if target not in PARAM_BASE or not instructions:
        raise VerificationError(f"kernel {name}: no machine code of a known target")
    return SassFlow(name, Listing(tuple(instructions), labels), _offsets(params, PARAM_BASE[target]))


def _offsets(params: Sequence[tuple[str, str]], base: int) -> dict[int, str]:
    """Addresses of both halves of every pointer."""
    offsets: dict[int, str] = {}
    at = base
    for name, type in params:
        size = 8 if type.startswith("*") else 4
        at += -at % size
        if size == 8:
            offsets |= {at: name, at + 4: name}
        at += size
    return offsets


def _registers(text: str) -> list[str]:
    return [f"{bank}{number}" for bank, number in _REGISTER.findall(text)]


def _executed(instruction: Instruction, before: Taints) -> Taints:
    """Taints after ``instruction``."""
    first, _, rest = instruction.operands.partition(",")
    target = _REGISTER.fullmatch(first.strip().removesuffix(".reuse"))
    if target is None or instruction.operation in _NO_TARGET:
        return before
    bank, number = target.group(1), int(target.group(2))
    written = [f"{bank}{number + i}" for i in range(_width(instruction.opcode))]
    if instruction.operation in ("LDC", "ULDC", "LDCU") and (constant := _CONSTANT.search(rest)):
        offset = int(constant.group(1), 16)
        made = {r: frozenset({offset + 4 * i}) for i, r in enumerate(written)}
    elif instruction.operation in ("LDG", "LDS", "LDSM", "LDL", "ATOMG", "S2R", "CS2R"):
        made = dict.fromkeys(written, frozenset[int]())
    else:
        # A pair is named by its lower half, which knows where an address came from.
        sources = [before.get(r, frozenset()) for r in _registers(rest)]
        constants = frozenset(int(c, 16) for c in _CONSTANT.findall(rest))
        made = dict.fromkeys(written, constants.union(*sources))
    if instruction.guard:  # it may not be done: what was there may remain
        made = {r: t | before.get(r, frozenset()) for r, t in made.items()}
    return {**before, **made}


def _width(opcode: str) -> int:
    """Registers that an instruction writes."""
    modifiers = opcode.split(".")[1:]
    if "128" in modifiers or "4" in modifiers:
        return 4
    return 2 if {"64", "WIDE", "2"} & set(modifiers) else 1


def _continues(instruction: Instruction) -> tuple[Sequence[str], bool]:
    """See :data:`flintc.codegen.listing.Continues`."""
    conditional = bool(instruction.guard) or bool(_PREDICATE.search(instruction.operands.partition("`")[0]))
    match instruction.operation:
        case "BRA":
            return _TARGET.findall(instruction.operands), conditional
        case "CALL":
            return _TARGET.findall(instruction.operands), True
        case "EXIT":
            return [], conditional
        case "RET":
            return [], bool(instruction.guard)
        case "BRX" | "JMP" | "JMX" | "BREAK":
            raise VerificationError(f"cannot tell where {instruction.opcode} {instruction.operands} goes")
    return [], True
