"""Loads cubins and launches kernels through the CUDA driver; no compiler is involved.

Triton's own launcher would need Triton at run time, and the C stub of its ahead-of-time tool drops the attribute that
makes dependent launch possible, so launches go through ``cuLaunchKernelEx``.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flintc.errors import BackendError
from flintc.ir.plan import CompiledKernel, Kernel

#: Dynamic shared memory a launch may use without asking the driver for more.
_DEFAULT_SHARED_BYTES = 48 * 1024


def load_driver() -> Any:
    """The module ``cuda.bindings.driver``; BackendError names the package to install where it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError(
            "the cuda backend needs the package cuda-bindings", remedy="pip install 'flintc[cuda]'"
        ) from error
    return driver


def check(result: tuple[Any, ...]) -> Any:
    """Result of a driver call without its status; BackendError with the driver's words if it failed."""
    driver = load_driver()
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise BackendError(f"CUDA driver: {status.name}: {text.decode() if text else 'no description'}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedKernel:
    """A kernel in device memory, ready to launch; its module is unloaded when it is collected."""

    name: str
    function: Any
    module: Any
    num_warps: int
    shared_bytes: int
    waits: bool
    extra_pointers: int
    room: Room
    apart: bool

    def shared_of(self, programs: int) -> int:
        """Dynamic shared memory of a launch of so many programs, in bytes: so much that they lie apart, if they are to.

        Of a launch that starts while another one still runs, programs would otherwise pile up where that one ends
        first, and those that share a multiprocessor end last.
        """
        apart = self.apart and programs <= self.room.multiprocessors
        return max(self.shared_bytes, self.room.alone if apart else 0)

    def resident(self, programs: int) -> int:
        """Of a launch of so many, how many fit a multiprocessor at once, by registers, shared memory and warps."""
        driver, threads, shared = load_driver(), 32 * self.num_warps, self.shared_of(programs)
        return int(check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared)))


@dataclass(frozen=True, slots=True)
class Room:
    """A GPU as programs fill it. alone: bytes of dynamic shared memory of which no two fit a multiprocessor.

    It is half of what one has: the driver takes a KiB for each program besides.
    """

    multiprocessors: int
    alone: int


def room_of_device() -> Room:
    """That of the current CUDA context's GPU."""
    driver = load_driver()
    device = check(driver.cuCtxGetDevice())

    def figure(name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(attribute, device)))

    return Room(figure("MULTIPROCESSOR_COUNT"), figure("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // 2)


def load_kernel(kernel: Kernel, compiled: CompiledKernel) -> LoadedKernel:
    """Load ``compiled`` into the current CUDA context."""
    driver = load_driver()
    module = check(driver.cuModuleLoadData(compiled.cubin))
    function = check(driver.cuModuleGetFunction(module, compiled.entry.encode()))
    room = room_of_device()
    most = max(compiled.shared_bytes, room.alone if kernel.apart else 0)
    if most > _DEFAULT_SHARED_BYTES:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, most))
    loaded = LoadedKernel(
        kernel.name, function, module, compiled.num_warps, compiled.shared_bytes, kernel.waits,
        len(compiled.params) - len(kernel.params), room, kernel.apart,
    )  # fmt: skip
    weakref.finalize(loaded, driver.cuModuleUnload, module).atexit = False  # at exit the context may be gone
    return loaded


class PreparedLaunch:
    """A launch with its arguments packed: launching it again costs one driver call.

    ``arguments`` are device addresses and 32-bit integers in parameter order, ``types`` the kernel's parameter types.
    ``dependent`` False leaves out the attribute of kernels that wait: their waits then return at once, since the
    launches before have ended.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, int, int],
        types: Sequence[str],
        arguments: Sequence[int],
        *,
        dependent: bool = True,
    ) -> None:
        driver = load_driver()
        self.kernel = kernel
        slots = [ctypes.c_int32(a) if t == "i32" else ctypes.c_void_p(a) for t, a in zip(types, arguments, strict=True)]
        # Triton's kernels end in pointers to scratch memory they may ask for; ours never do.
        slots += [ctypes.c_void_p(0)] * kernel.extra_pointers
        self._slots = slots
        self._params = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(s) for s in slots))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * kernel.num_warps, 1, 1
        config.sharedMemBytes = kernel.shared_of(math.prod(grid))
        attributes = []
        if kernel.waits and dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self._config = config

    def __call__(self, stream: int) -> None:
        """Enqueue on ``stream`` (a CUDA stream handle)."""
        driver = load_driver()
        self._config.hStream = driver.CUstream(stream)
        check(driver.cuLaunchKernelEx(self._config, self.kernel.function, ctypes.addressof(self._params), 0))
