"""What a process can begin before it has imported torch, which takes longer than all else up to the first token.

Threads of their own map torch's libraries and create the GPU's context: neither needs Python, so both run beside the
imports. And those make objects by the hundred thousand that all stay: looking through them for garbage takes a sixth of
the time, so it waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flintc.runtime.cuda.driver import check, load_driver

#: Torch's own libraries, in the order in which they need each other.
_LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so")


@contextlib.contextmanager
def early_start(*, gpu: bool) -> Iterator[None]:
    """Begin what is slow, for a ``gpu`` or without; within the block no garbage is collected.

    Silent where something fails: whoever needs it will be told why it is not there.
    """
    if "torch" not in sys.modules:
        _in_background(_map_libraries)
    if gpu:
        _in_background(_create_context)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _in_background(work: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    threading.Thread(target=run, daemon=True).start()


def _map_libraries() -> None:
    """Load torch's libraries into the process; by ``dlopen`` itself, as ``ctypes.CDLL`` would hold Python's lock."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name in _LIBRARIES:
        library = Path(found.origin).parent / "lib" / name
        # As torch loads it: what its other libraries need has to be visible to them.
        visible = os.RTLD_GLOBAL if name == _LIBRARIES[0] else os.RTLD_LOCAL
        if library.is_file():
            dlopen(os.fsencode(library), os.RTLD_NOW | visible)


def _create_context() -> None:
    """Create the first GPU's primary context, half a second of work."""
    driver = load_driver()
    check(driver.cuInit(0))
    check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
