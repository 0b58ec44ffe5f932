"""What a process can begin before it has imported torch, which takes longer than all else up to the first token.

Threads of their own have the weights' files read from the disk, map torch's libraries and create the GPU's context:
nothing of that needs Python, so it runs beside the imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flintc.garbage import uncollected
from flintc.runtime.cuda.driver import check, load_driver

#: Torch's own libraries, in the order in which they need each other.
_LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so")
#: Bytes of a file that the system is asked to read at a time: between two requests this thread takes Python's lock.
_STRETCH = 64 << 20


@contextlib.contextmanager
def early_start(weights: str | Path | None = None, *, gpu: bool = False) -> Iterator[None]:
    """Begin what is slow, for a ``gpu`` or without. In the block, where no garbage is collected, call import_torch.

    weights: a checkpoint's file or folder, if it is here. Silent where something fails: whoever needs it will be told
    why it is not there.
    """
    loading = []
    if gpu:
        _import_driver()
    if "torch" not in sys.modules:
        loading.append(_in_background(_map_libraries))
        if weights is not None:
            _in_background(partial(read_ahead, weights))
    if gpu:
        loading.append(_in_background(_create_context))
    with uncollected():
        try:
            yield
        finally:
            # A process that ends while libraries are loaded into it crashes: what refuses a load at once waits here.
            for thread in loading:
                thread.join()


def import_torch() -> None:
    """Import torch, in a thread of its own, and wait for it. Silent where it fails: the next import will tell.

    What its import leaves as garbage refers to the calls that it was made in. Were these the caller's own, all that
    they hold, the weights of a model say, would outlive them until somebody looks among what is old.
    """
    _in_background(partial(importlib.import_module, "torch")).join()


def _in_background(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def read_ahead(weights: str | Path) -> None:
    """Bring the files of a checkpoint into the system's cache, at most half of the memory that is available.

    They are sent to where nothing is kept: so they are read as fast as the disk gives them, and never copied.
    """
    path = Path(weights).expanduser()
    left = _available() // 2
    with Path(os.devnull).open("wb") as nowhere:
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            left -= _read(file, left, nowhere.fileno())


def _read(file: Path, most: int, nowhere: int) -> int:
    """Bytes read of a file, at most ``most``; none of what is no regular file."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is no reason to wait
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return 0
        done = 0
        while done < most and (count := os.sendfile(nowhere, handle, done, min(_STRETCH, most - done))):
            done += count
        return done
    finally:
        os.close(handle)


def _available() -> int:
    """Bytes of memory that the system can give without swapping, its file cache included."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


def _import_driver() -> None:
    """Import what speaks to the driver, and have it load the driver's own library.

    Not in a thread: whoever loads a library while torch's are being mapped waits for those, and holds Python's lock.
    """
    with contextlib.suppress(Exception):
        load_driver().cuDriverGetVersion()


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
