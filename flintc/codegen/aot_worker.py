"""Compiles kernels with Triton in a process of its own: one JSON request a line on stdin, one JSON reply on stdout.

Run as a file by :mod:`flintc.codegen.aot_pool`. It needs the standard library and Triton alone: importing flintc, or
torch, would cost more than most kernels take to compile.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Pointers that Triton appends to a kernel's parameters, in its order.
APPENDED = ("global_scratch", "profile_scratch")

#: Registers of a thread are given out in steps of so many.
REGISTER_STEP = 8

#: Of Linux's <sys/personality.h>.
_ADDR_NO_RANDOMIZE, _ASK = 0x0040000, 0xFFFFFFFF

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_TRAP = re.compile(r"^\s*trap;", re.M)
_REGISTERS = re.compile(r"Used (\d+) registers")


class WorkerError(Exception):
    """A kernel that Triton compiled, or would compile, into something other than its description says."""


def load_entry(name: str, source: str, folder: Path) -> Any:
    """Function ``name`` of ``source``, written to a file first: Triton reads a function's text from its file."""
    folder.mkdir()
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry = getattr(module, name, None)
    if not isinstance(entry, triton.JITFunction):
        raise WorkerError(f"the source defines no @triton.jit function {name}")
    return entry


def describe(entry: Any, params: list[list[Any]], constants: Mapping[str, Any]) -> ASTSource:
    """The entry with the types of its parameters, the values of its constants, and the alignment of its pointers."""
    arguments: list[str] = entry.arg_names
    expected = [name for name, _, _ in params]
    found = [name for name in arguments if name not in constants]
    if found != expected or not set(constants) <= set(arguments):
        raise WorkerError(f"the entry takes {arguments}; described are {expected} and the constants {list(constants)}")
    types = {name: type_ for name, type_, _ in params}
    aligned = {name for name, type_, is_aligned in params if is_aligned and type_.startswith("*")}
    return ASTSource(
        entry,
        signature={name: types.get(name, "constexpr") for name in arguments},
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(arguments) if name in aligned},
    )


def appended_params(ptx: str, entry: str, metadata: Any, own: int) -> tuple[str, ...]:
    """Names of the parameters of ``entry`` in the PTX beyond the kernel's ``own``; all are null at a launch."""
    declaration = re.search(rf"\.entry {re.escape(entry)}\((.*?)\)", ptx, re.DOTALL)
    count = declaration.group(1).count(".param") - own if declaration else -1
    if not 0 <= count <= len(APPENDED):
        raise WorkerError(f"cannot account for the parameters of {entry} in its PTX")
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise WorkerError("the kernel asks for global scratch memory, which no launcher here provides")
    return APPENDED[:count]


class Compiler:
    """One kernel, compiled for one target after another.

    Python is translated once: up to the TTIR nothing depends on the target, and a target that comes later starts there.
    (Triton has one exception, how exactly products of fp8 are summed; no kernel has any.)
    """

    def __init__(self, request: Mapping[str, Any], folder: Path) -> None:
        entry = load_entry(request["name"], request["source"], folder)
        self._request = request
        self._source: ASTSource | str = describe(entry, request["params"], request["constants"])
        self._ttir = folder / f"{request['name']}.ttir"

    def build(self, capability: int) -> dict[str, Any]:
        """Compile for one compute capability; the reply holds everything that the kernel's description does not.

        A budget of registers was measured on one target; on another the assembler may need a few more for the same
        code. It gets them rather than spill.
        """
        budget = self._request["max_registers"]
        reply = self._within(budget, capability)
        if budget and reply["spill_stores"] + reply["spill_loads"]:
            more = self._within(budget + REGISTER_STEP, capability)
            if not more["spill_stores"] + more["spill_loads"]:
                return more
        return reply

    def _within(self, budget: int, capability: int) -> dict[str, Any]:
        """The same within ``budget`` registers a thread, 0 for as many as the compiler likes."""
        options = {
            "num_warps": self._request["num_warps"],
            "num_stages": self._request["num_stages"],
            "launch_pdl": self._request["waits"],
            "maxnreg": budget or None,
            # Without debug the checks are never made, but what they would compare is, and then removed again.
            "sanitize_overflow": False,
        }
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                compiled = triton.compile(self._source, target=GPUTarget("cuda", capability, 32), options=options)
            except Exception:
                print(printed.getvalue(), file=sys.stderr)
                raise
        if isinstance(self._source, ASTSource):
            self._ttir.write_text(compiled.asm["ttir"], encoding="utf-8")
            self._source = str(self._ttir)
        return reply_of(self._request, compiled, printed.getvalue())


def reply_of(request: Mapping[str, Any], compiled: Any, usage: str) -> dict[str, Any]:
    """What is to be known of a compiled kernel; ``usage``: what ptxas said of it."""
    spills, registers = _SPILLS.findall(usage), _REGISTERS.findall(usage)
    if not spills or not registers:
        raise WorkerError("ptxas did not say what resources the kernel uses")
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    if _TRAP.search(ptx):
        # Triton 3.7 says nothing where the tensor memory of a target runs out, and leaves a body that traps.
        raise WorkerError("the compiler gave the kernel up: all it does is trap")
    return {
        "entry": metadata.name,
        "appended": appended_params(ptx, metadata.name, metadata, len(request["params"])),
        "num_warps": metadata.num_warps,
        "shared_bytes": metadata.shared,
        "registers": max(map(int, registers)),
        "spill_stores": sum(int(stores) for stores, _ in spills),
        "spill_loads": sum(int(loads) for _, loads in spills),
        "cubin": base64.b64encode(compiled.asm["cubin"]).decode("ascii"),
        "ptx": ptx,
    }


def summary(error: BaseException) -> str:
    """The line of an error that says what is wrong; Triton prints the source before it and chains calls."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if isinstance(error, triton.CompilationError) else lines[0]


def serve(requests: TextIO, replies: TextIO, folder: Path) -> None:
    """Answer requests until there are no more.

    A reply lists in ``compiled`` what came of the request's capabilities, up to the first that failed; why that one
    did is in ``error`` and ``details``.
    """
    for number, line in enumerate(requests):
        request = json.loads(line)
        compiled: list[dict[str, Any]] = []
        reply: dict[str, Any] = {"compiled": compiled}
        try:
            compiler = Compiler(request, folder / str(number))
            compiled.extend(map(compiler.build, request["capabilities"]))
        except Exception as error:  # Triton raises many kinds; each becomes the kernel's error, and the worker lives on
            reply |= {"error": summary(error), "details": "".join(traceback.format_exception(error))}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def fix_addresses() -> None:
    """Let programs started from here have their memory at the same addresses every time, where the system allows it.

    ptxas 13.1 for Blackwell decides some things by where its data lie: the same PTX then gives various cubins.
    """
    with contextlib.suppress(AttributeError, OSError):
        personality = ctypes.CDLL(None).personality
        current = personality(_ASK)
        if current >= 0:
            personality(current | _ADDR_NO_RANDOMIZE)


def main() -> None:
    """Serve on the streams the process was started with; whatever else prints goes to stderr."""
    fix_addresses()
    # Triton makes a tree of small objects for each kernel and drops it: searching them for cycles takes a tenth of all.
    gc.disable()
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    serve(sys.stdin, replies, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
