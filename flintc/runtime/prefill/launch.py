"""How a routine calls its kernels: by name, arguments by parameter name."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flintc.ir.plan import CompiledKernel, Kernel

if TYPE_CHECKING:
    from flintc.runtime.cuda.driver import LoadedKernel

Grid = tuple[int, int, int]


class Launch(Protocol):
    """Calls a kernel of the general path."""

    def __call__(self, kernel: Kernel, grid: Grid, **arguments: Tensor | int) -> None:
        """Enqueue ``kernel`` over ``grid``; pointers by parameter name without ``_ptr``, all contiguous."""
        ...


class CudaLaunch:
    """Launches ahead-of-time compiled kernels on the current stream: a chunk has a thousand, so each must be cheap."""

    def __init__(self, kernels: Mapping[str, Kernel], compiled: Mapping[str, CompiledKernel]) -> None:
        from flintc.runtime.cuda.driver import load_driver, load_kernel

        self._driver = load_driver()
        self._entries = {name: _Entry(kernel, load_kernel(kernel, compiled[name])) for name, kernel in kernels.items()}

    def __call__(self, kernel: Kernel, grid: Grid, **arguments: Tensor | int) -> None:
        """See :class:`Launch`."""
        from flintc.runtime.cuda.driver import check

        entry = self._entries[kernel.name]
        for slot, value in zip(entry.slots, ordered(kernel, entry.names, arguments), strict=False):
            slot.value = value if isinstance(value, int) else value.data_ptr()
        check(
            self._driver.cuLaunchKernel(
                entry.loaded.function, *grid, 32 * entry.loaded.num_warps, 1, 1, entry.loaded.shared_bytes,
                torch.cuda.current_stream().cuda_stream, entry.address, 0,
            )
        )  # fmt: skip


class _Entry:
    """A loaded kernel and the memory that its arguments are passed in; the driver copies them at each launch."""

    def __init__(self, kernel: Kernel, loaded: LoadedKernel) -> None:
        self.loaded = loaded
        self.names = names_of(kernel)
        own = [ctypes.c_int32() if p.type == "i32" else ctypes.c_void_p() for p in kernel.params]
        # Triton's kernels end in pointers to scratch memory they may ask for; ours never do.
        self.slots = [*own, *(ctypes.c_void_p(0) for _ in range(loaded.extra_pointers))]
        self._pointers = (ctypes.c_void_p * len(self.slots))(*(ctypes.addressof(slot) for slot in self.slots))
        self.address = ctypes.addressof(self._pointers)


class InterpretedLaunch:
    """Runs kernels in Triton's interpreter, on CPU tensors."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        from flintc.codegen.interpret import load_interpreted

        self._loaded: dict[str, Any] = {name: load_interpreted(kernel) for name, kernel in kernels.items()}

    def __call__(self, kernel: Kernel, grid: Grid, **arguments: Tensor | int) -> None:
        """See :class:`Launch`."""
        self._loaded[kernel.name](grid, ordered(kernel, names_of(kernel), arguments))


def names_of(kernel: Kernel) -> tuple[str, ...]:
    """What a launch calls the kernel's parameters."""
    return tuple(p.name.removesuffix("_ptr") for p in kernel.params)


def ordered(kernel: Kernel, names: Sequence[str], arguments: Mapping[str, Tensor | int]) -> list[Tensor | int]:
    """The arguments in the order of ``names``, all of which and no others are given."""
    if len(names) != len(arguments):
        raise TypeError(f"{kernel.name} takes {', '.join(names)}, not {', '.join(arguments)}")
    return [arguments[name] for name in names]
