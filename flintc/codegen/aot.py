"""Ahead-of-time compilation: kernels to cubins, with no GPU, in parallel, cached by content."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from flintc.codegen.aot_pool import WORKER, Reply, Request, run_requests
from flintc.codegen.cache import Store, cache_root, write_atomically
from flintc.errors import CompileError, UsageError, VerificationError
from flintc.ir.plan import CompiledKernel, Kernel

#: Compute capability of each target.
TARGETS: Mapping[str, int] = {"sm_90": 90, "sm_100": 100}

#: Called with (kernels done, kernels in all, name of the kernel just done); cached ones count as done.
Progress = Callable[[int, int, str], None]


def compile_kernels(
    kernels: Iterable[Kernel],
    targets: Sequence[str],
    *,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, str], CompiledKernel]:
    """Compile every kernel for every target; keys are (kernel name, target), in the order given.

    ``jobs`` defaults to the cores this process may use, ``cache_dir`` to :func:`cache_root`. The result depends on
    the kernels, the targets and the installed Triton, on nothing else of the machine.

    Raises UsageError for an unknown target, CompileError naming the first kernel that does not compile and the files
    that hold its source and the compiler's output.
    """
    folder = cache_dir if cache_dir is not None else cache_root()
    builds = [_Build(kernel, target) for kernel in _unique(kernels) for target in _known(targets)]
    store = Store(folder / "kernels")
    done: dict[_Build, CompiledKernel] = {}

    def finish(build: _Build, compiled: CompiledKernel) -> None:
        done[build] = compiled
        if progress is not None:
            progress(len(done), len(builds), build.kernel.name)

    for build in builds:
        if (stored := store.get(build.key)) is not None:
            finish(build, _compiled(build, json.loads(stored)))
    # The longest first, so that no worker is left alone with one at the end; source length is a fair guess.
    groups = groupby((b for b in builds if b not in done), key=lambda b: b.kernel.name)
    missing = sorted((list(group) for _, group in groups), key=lambda group: -len(group[0].kernel.source))
    for index, reply in run_requests(list(map(_request, missing)), jobs or len(os.sched_getaffinity(0))):
        group = missing[index]
        for build, result in zip(group, reply["compiled"], strict=False):
            store.put(build.key, json.dumps(result).encode("ascii"))
            finish(build, _compiled(build, result))
        if "error" in reply:
            raise _failure(group[len(reply["compiled"])], reply, folder / "failed")
    return {(b.kernel.name, b.target): done[b] for b in builds}


@dataclass(frozen=True, eq=False)
class _Build:
    """One kernel for one target."""

    kernel: Kernel
    target: str

    @cached_property
    def key(self) -> str:
        """Name of the result in the cache: what the compiler is told, and which compiler."""
        content = json.dumps([_request([self]), version("triton"), _worker_digest()], sort_keys=True)
        return hashlib.sha256(content.encode("ascii")).hexdigest()


def _request(group: Sequence[_Build]) -> Request:
    """Everything that the compiler is told for ``group``, the builds of one kernel."""
    k = group[0].kernel
    return {
        "name": k.name,
        "source": k.source,
        "params": [[p.name, p.type, p.aligned] for p in k.params],
        "constants": dict(k.constants),
        "num_warps": k.num_warps,
        "num_stages": k.num_stages,
        "waits": k.waits,
        "max_registers": k.max_registers,
        "capabilities": [TARGETS[build.target] for build in group],
    }


@cache
def _worker_digest() -> str:
    return hashlib.sha256(WORKER.read_bytes()).hexdigest()


def _known(targets: Sequence[str]) -> tuple[str, ...]:
    for target in targets:
        if target not in TARGETS:
            raise UsageError(f"unknown target {target!r}", remedy=f"choose from {', '.join(TARGETS)}")
    return tuple(dict.fromkeys(targets))


def _unique(kernels: Iterable[Kernel]) -> list[Kernel]:
    by_name: dict[str, Kernel] = {}
    for kernel in kernels:
        if by_name.setdefault(kernel.name, kernel) != kernel:
            raise VerificationError(f"two different kernels are called {kernel.name}")
    return list(by_name.values())


def _compiled(build: _Build, reply: Reply) -> CompiledKernel:
    return CompiledKernel(
        kernel=build.kernel.name,
        target=build.target,
        entry=reply["entry"],
        params=(*(p.name for p in build.kernel.params), *reply["appended"]),
        num_warps=reply["num_warps"],
        shared_bytes=reply["shared_bytes"],
        registers=reply["registers"],
        spill_stores=reply["spill_stores"],
        spill_loads=reply["spill_loads"],
        cubin=base64.b64decode(reply["cubin"]),
        ptx=reply["ptx"],
    )


def _failure(build: _Build, reply: Reply, folder: Path) -> CompileError:
    """The error to raise, after saving what is needed to look into it."""
    message = f"kernel {build.kernel.name} does not compile for {build.target}: {reply['error']}"
    stem = folder / f"{build.kernel.name}.{build.target}"
    source, log = stem.with_name(stem.name + ".py"), stem.with_name(stem.name + ".log")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(source, build.kernel.source.encode())
        write_atomically(log, reply["details"].encode())
    except OSError:
        return CompileError(message)
    return CompileError(message, remedy=f"source: {source}, compiler output: {log}")
