"""What a kernel's PTX does to memory, above and below its wait, parameter by parameter.

PTX is what every pass of the compiler but the assembler has worked on: a load that one of them hoisted stands here
where it will run. Which parameter an address comes from is followed through the registers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flintc.codegen.listing import Instruction, Listing, following, waits_before
from flintc.errors import VerificationError
from flintc.ir.plan import EffectKind

_COMMENT = re.compile(r"//[^\n]*")
_LABEL = re.compile(r"\s*(\$[\w$]+):")
_INSTRUCTION = re.compile(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"%[\w$]+")
_ADDRESS = re.compile(r"\[\s*([%\w$]+)")

_WAIT, _TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
#: State spaces that belong to the program or the launch alone.
_PRIVATE = (".param", ".shared", ".local", ".const")


@dataclass(frozen=True, slots=True)
class PtxAccess:
    """One instruction that touches memory shared between launches; ``nc``: past the coherent caches."""

    kind: EffectKind
    param: str
    index: int
    nc: bool = False


@dataclass(frozen=True)
class Ptx:
    """One entry of a PTX file, whose parameters are called ``params``."""

    name: str
    listing: Listing
    params: tuple[str, ...]

    @cached_property
    def waits(self) -> frozenset[int]:
        """Instructions that wait for the launches before."""
        return self._all(_WAIT)

    @cached_property
    def triggers(self) -> frozenset[int]:
        """Instructions that let the next launch start."""
        return self._all(_TRIGGER)

    @cached_property
    def waited(self) -> list[frozenset[int]]:
        """Per instruction, how often a program may have waited when it comes there."""
        return waits_before(following(self.listing, _continues), self.waits)

    @property
    def waited_at_end(self) -> frozenset[int]:
        """How often a program may have waited when it ends."""
        ends = (i for i, x in enumerate(self.listing.instructions) if x.operation in ("ret", "exit"))
        return frozenset(count for i in ends for count in self.waited[i])

    @cached_property
    def accesses(self) -> tuple[PtxAccess, ...]:
        """Every access to memory shared between launches; VerificationError where one cannot be told."""
        found = []
        for index, instruction in enumerate(self.listing.instructions):
            kind = self._kind(instruction)
            if kind is None:
                continue
            for param in self._pointed(instruction):
                found.append(PtxAccess(kind, param, index, ".nc" in instruction.opcode))
        return tuple(found)

    def _all(self, opcode: str) -> frozenset[int]:
        return frozenset(i for i, x in enumerate(self.listing.instructions) if x.opcode == opcode)

    def _kind(self, instruction: Instruction) -> EffectKind | None:
        """What it does to memory shared between launches; None for nothing."""
        if "[" not in instruction.operands:
            return None
        opcode = instruction.opcode
        if opcode.startswith("cp.async.c") and opcode.endswith(".shared.global"):
            return "read"
        if opcode.startswith("prefetch.global"):
            return "hint"
        if opcode.startswith("ld.global") and ".acquire" in opcode:
            return "arrive"  # a look at a counter: what an atomic that adds nothing becomes
        if ".global" not in opcode and any(space in opcode for space in _PRIVATE):
            return None
        kinds: dict[str, EffectKind] = {"ld": "read", "st": "write", "atom": "arrive", "red": "arrive"}
        if instruction.operation in kinds and ".global" in opcode:
            return kinds[instruction.operation]
        raise VerificationError(f"kernel {self.name}: cannot tell what {opcode} touches")

    def _pointed(self, instruction: Instruction) -> Sequence[str]:
        address = _ADDRESS.findall(instruction.operands)[-1]
        params = self._origins.get(address, frozenset())
        if not params:
            raise VerificationError(
                f"kernel {self.name}: cannot tell which parameter {instruction.operands} points into"
            )
        return sorted(params)

    @cached_property
    def _origins(self) -> dict[str, frozenset[str]]:
        """Register -> parameters that its value may be an address into."""
        flows: dict[str, set[str]] = {}
        origins: dict[str, frozenset[str]] = {}
        for instruction in self.listing.instructions:
            targets, sources = _operands(instruction)
            if instruction.opcode.startswith("ld.param"):
                if instruction.opcode.endswith("64"):  # pointers; numbers are 32 bits wide
                    (number,) = re.findall(r"_param_(\d+)", instruction.operands)
                    origins |= dict.fromkeys(targets, frozenset({self.params[int(number)]}))
            elif instruction.operation not in ("ld", "atom", "setp"):
                for target in targets:
                    flows.setdefault(target, set()).update(sources)
        changed = True
        while changed:
            changed = False
            for target, flowing in flows.items():
                before = origins.get(target, frozenset())
                after = before.union(*(origins[s] for s in flowing if s in origins))
                if after != before:
                    origins[target], changed = after, True
        return origins


def parse_ptx(name: str, text: str, params: Sequence[str]) -> Ptx:
    """The entry in ``text``; ``params`` are the names of its parameters in order."""
    body = _COMMENT.sub("", text)
    begin, end = body.find("{", body.find(".entry")), body.rfind("}")
    if ".entry" not in body or not 0 <= begin < end:
        raise VerificationError(f"kernel {name}: its PTX holds no entry")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body[begin + 1 : end].split(";"):
        while label := _LABEL.match(statement):
            labels[label.group(1)] = len(instructions)
            statement = statement[label.end() :]
        statement = statement.strip().lstrip("{} \t\n")
        while label := _LABEL.match(statement):
            labels[label.group(1)] = len(instructions)
            statement = statement[label.end() :].strip()
        if not statement or statement.startswith("."):
            continue
        match = _INSTRUCTION.fullmatch(statement)
        if match is None:
            raise VerificationError(f"kernel {name}: cannot read its PTX at {statement[:60]!r}")
        guard, opcode, operands = match.groups()
        instructions.append(Instruction(opcode, operands.strip(), guard or ""))
    return Ptx(name, Listing(tuple(instructions), labels), tuple(params))


def _operands(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Registers written, and those read."""
    text = instruction.operands
    split = text.find("}") + 1 if text.lstrip().startswith("{") else text.find(",")
    first, rest = (text, "") if split <= 0 else (text[:split], text[split:])
    return _REGISTER.findall(first), _REGISTER.findall(rest)


def _continues(instruction: Instruction) -> tuple[Sequence[str], bool]:
    """See :data:`flintc.codegen.listing.Continues`."""
    match instruction.operation:
        case "bra":
            return [instruction.operands.strip()], bool(instruction.guard)
        case "ret" | "exit" | "trap":
            return [], bool(instruction.guard)
        case "brx" | "call":
            raise VerificationError(f"cannot tell where {instruction.opcode} {instruction.operands} goes")
    return [], True
