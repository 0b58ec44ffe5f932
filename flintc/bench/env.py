"""Facts about this machine and installation, for bug reports. Imports neither torch nor Triton."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flintc.codegen.aot import TARGETS
from flintc.codegen.cache import cache_root

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "cuda-bindings")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that the CUDA driver offers to this process; ``memory`` in bytes."""

    name: str
    target: str
    multiprocessors: int
    memory: int

    def __str__(self) -> str:
        return f"{self.name} ({self.target}, {self.multiprocessors} SMs, {self.memory / _GIB:.1f} GiB)"


def facts() -> dict[str, Any]:
    """Every fact as text, a number, or a list of texts, in the order a person would ask."""
    gpus = find_gpus()
    cache = cache_root()
    return {
        "flintc": version("flintc"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / _GIB:.1f} GiB",
        **{package: installed(package) for package in _PACKAGES},
        "driver": driver_version(),
        "gpus": [str(gpu) for gpu in gpus],
        "compiles_for": list(TARGETS),
        "backends": backends(gpus),
        "cache": str(cache),
        "cache_size": f"{folder_bytes(cache) / (1 << 20):.1f} MiB",
        **{name: os.environ[name] for name in sorted(os.environ) if name.startswith("FLINTC_")},
    }


def installed(package: str) -> str:
    """Version of a package, or ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def backends(gpus: list[Gpu]) -> list[str]:
    """Backends that can run here, the default first; where a GPU lacks only cuda-bindings the default is an error."""
    usable = any(gpu.target in TARGETS for gpu in gpus) and installed("cuda-bindings") != "not installed"
    return [*(["cuda"] if usable else []), "reference", "interpret"]


def driver_version() -> str:
    """Version of the kernel's NVIDIA driver, and the newest CUDA it serves; ``none`` without one."""
    driver = _cuda_driver()
    if driver is None:
        return "none"
    cuda = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(cuda))
    return f"{_kernel_driver()} (CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10})"


def find_gpus() -> list[Gpu]:
    """GPUs visible to this process, in the driver's order; none where there is no driver or it does not start."""
    driver = _cuda_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_gpu(driver, i) for i in range(count.value)]


def folder_bytes(folder: Path) -> int:
    """Bytes of the regular files below ``folder``, 0 where there is none; links are not followed."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a compilation running beside this one renames its files
            total += 0 if file.is_dir() else file.lstat().st_size
    return total


#: Attribute numbers of cuDeviceGetAttribute.
_ATTRIBUTES: Mapping[str, int] = {"multiprocessors": 16, "major": 75, "minor": 76}


def _gpu(driver: Any, index: int) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    got = {key: ctypes.c_int() for key in _ATTRIBUTES}
    for key, number in _ATTRIBUTES.items():
        driver.cuDeviceGetAttribute(ctypes.byref(got[key]), number, device)
    target = f"sm_{got['major'].value}{got['minor'].value}"
    return Gpu(name.value.decode(errors="replace"), target, got["multiprocessors"].value, memory.value)


def _cuda_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _kernel_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown version"
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return found.group() if found else "unknown version"
