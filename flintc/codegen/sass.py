"""Looks into cubins with the tools that ship in the Triton wheel; no GPU is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from flintc.errors import BackendError, VerificationError

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_NARROW = {"U8": 8, "S8": 8, "U16": 16, "S16": 16}


@dataclass(frozen=True, slots=True)
class Sass:
    """Machine code of a cubin: its listing, and its opcodes with their modifiers in program order."""

    text: str
    opcodes: tuple[str, ...]

    def count(self, operation: str) -> int:
        """Instructions of ``operation``, whatever their modifiers: ``LDG`` counts ``LDG.E.128`` but not ``LDGSTS``."""
        return sum(opcode.partition(".")[0] == operation for opcode in self.opcodes)

    @property
    def waits(self) -> int:
        """Waits for the launches before this one (``griddepcontrol.wait``)."""
        return self.count("ACQBULK")

    @property
    def triggers(self) -> int:
        """Points that let the next launch start (``griddepcontrol.launch_dependents``)."""
        return self.count("PREEXIT")

    @property
    def local_accesses(self) -> int:
        """Loads and stores of thread-local memory: register spills and arrays indexed at run time."""
        return self.count("LDL") + self.count("STL")

    @property
    def before_wait(self) -> tuple[str, ...]:
        """Opcodes ahead of the first wait; all of them where there is none."""
        first = next((i for i, opcode in enumerate(self.opcodes) if opcode == "ACQBULK"), len(self.opcodes))
        return self.opcodes[:first]

    def load_widths(self) -> Counter[int]:
        """Bits per thread of each global load, with how many instructions load that many."""
        return Counter(_width(opcode) for opcode in self.opcodes if opcode.startswith("LDG."))


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a cubin's entry: registers per thread, the rest in bytes (shared memory: the static part only)."""

    registers: int
    stack: int
    shared: int
    local: int


def disassemble(cubin: bytes) -> Sass:
    """The machine code of ``cubin``; VerificationError if it is not one."""
    text = _run("nvdisasm", "-c", cubin=cubin)
    return Sass(text, tuple(_INSTRUCTION.findall(text)))


def resource_usage(cubin: bytes) -> Usage:
    """What the entry of ``cubin`` uses; VerificationError unless it holds exactly one."""
    found = _USAGE.findall(_run("cuobjdump", "--dump-resource-usage", cubin=cubin))
    if len(found) != 1:
        raise VerificationError(f"a cubin with {len(found)} entries, not one")
    return Usage(*map(int, found[0]))


def _width(opcode: str) -> int:
    for modifier in opcode.split(".")[1:]:
        if modifier in _NARROW:
            return _NARROW[modifier]
        if modifier in ("64", "128", "256"):
            return int(modifier)
    return 32


def _run(tool: str, option: str, *, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([_tools() / tool, option, file.name], capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        raise VerificationError(f"{tool} refuses the cubin: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


@cache
def _tools() -> Path:
    """Folder of NVIDIA's tools inside the Triton package, found without importing it."""
    package = find_spec("triton")
    if package is None or package.origin is None:
        raise BackendError("Triton is not installed", remedy="pip install triton")
    return Path(package.origin).parent / "backends" / "nvidia" / "bin"
