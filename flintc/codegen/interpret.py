"""Runs a generated kernel in Triton's interpreter, on the CPU."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

import triton
import triton.experimental.gluon  # Triton imports it at its first launch, when the library below is swapped
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from triton.runtime.jit import JITFunction

from flintc.codegen.remembered import remembered_types
from flintc.ir.plan import Kernel

Grid = tuple[int, int, int]


def load_interpreted(kernel: Kernel) -> Callable[[Grid, Sequence[Any]], None]:
    """The kernel as a function of a grid and its arguments (CPU tensors and ints, in parameter order).

    Triton decides when a function is decorated whether it is interpreted; the kernel's file is therefore executed
    under the interpreter's switch, whatever the process was started with. The text must come from this package's
    own templates: it is executed.
    """
    entry = _entry(kernel.name, kernel.source)

    def call(grid: Grid, args: Sequence[Any]) -> None:
        with _interpreted_standard_library(), _unchecked_integers(), remembered_types():
            entry[grid](*args, **kernel.constants)

    return call


@lru_cache(maxsize=256)
def _entry(name: str, source: str) -> Any:
    """The function ``name`` of ``source``, to be interpreted."""
    # The interpreter reads a function's text when it first runs it: kernels of one name and another text must not meet.
    file = f"<flintc kernel {name} {sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"flintc_interpreted_{name}"}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        exec(compile(source, file, "exec"), namespace)
    namespace["INTERPRET"] = tl.constexpr(True)
    entry = namespace[name]
    # An interpreted function patches the whole language anew at each call; the entry's patch serves its helpers too,
    # and those of the standard library, which know the language as `core`.
    helpers = {n: f for n, f in namespace.items() if isinstance(f, InterpretedFunction) and f is not entry}
    namespace.update((name, helper.rewrite()) for name, helper in helpers.items())
    namespace["core"] = tl.core
    return entry


@contextmanager
def _interpreted_standard_library() -> Iterator[None]:
    """``tl.sum`` and its like are compiled functions unless Triton was imported under the interpreter's switch."""
    swapped: list[tuple[Any, str, JITFunction[Any]]] = []
    try:
        for module in (tl, tl.standard):
            for name, member in list(vars(module).items()):
                if isinstance(member, JITFunction):
                    setattr(module, name, _plain(member))
                    swapped.append((module, name, member))
        yield
    finally:
        for module, name, member in swapped:
            setattr(module, name, member)


def _plain(function: JITFunction[Any]) -> Callable[..., Any]:
    """The function as the interpreter calls it under a patched language; ``fn``, as reductions look for it."""
    plain: Any = InterpretedFunction(function.fn).rewrite()
    plain.fn = function.fn
    return plain  # type: ignore[no-any-return]


@contextmanager
def _unchecked_integers() -> Iterator[None]:
    """The interpreter computes every integer sum and product twice, for an overflow check that it then leaves out."""
    options = interpreter_builder.options
    interpreter_builder.options = replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter_builder.options = options
