"""How a routine calls its kernels: by name, arguments by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from flintc.ir.plan import CompiledKernel, Kernel

Grid = tuple[int, int, int]


class Launch(Protocol):
    """Calls a kernel of the general path."""

    def __call__(self, kernel: Kernel, grid: Grid, **arguments: Tensor | int) -> None:
        """Enqueue ``kernel`` over ``grid``; pointers by parameter name without ``_ptr``, all contiguous."""
        ...


class CudaLaunch:
    """Launches ahead-of-time compiled kernels on the current stream."""

    def __init__(self, kernels: Mapping[str, Kernel], compiled: Mapping[str, CompiledKernel]) -> None:
        from flintc.runtime.cuda.driver import load_kernel

        self._loaded = {name: load_kernel(kernel, compiled[name]) for name, kernel in kernels.items()}

    def __call__(self, kernel: Kernel, grid: Grid, **arguments: Tensor | int) -> None:
        """See :class:`Launch`."""
        import torch

        from flintc.runtime.cuda.driver import PreparedLaunch

        types = [p.type for p in kernel.params]
        packed = [a if isinstance(a, int) else a.data_ptr() for a in _ordered(kernel, arguments)]
        PreparedLaunch(self._loaded[kernel.name], grid, types, packed)(torch.cuda.current_stream().cuda_stream)


class InterpretedLaunch:
    """Runs kernels in Triton's interpreter, on CPU tensors."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        from flintc.codegen.interpret import load_interpreted

        self._loaded: dict[str, Any] = {name: load_interpreted(kernel) for name, kernel in kernels.items()}

    def __call__(self, kernel: Kernel, grid: Grid, **arguments: Tensor | int) -> None:
        """See :class:`Launch`."""
        self._loaded[kernel.name](grid, _ordered(kernel, arguments))


def _ordered(kernel: Kernel, arguments: Mapping[str, Tensor | int]) -> list[Tensor | int]:
    names = [p.name.removesuffix("_ptr") for p in kernel.params]
    if set(names) != set(arguments):
        raise TypeError(f"{kernel.name} takes {names}, not {sorted(arguments)}")
    assert all(isinstance(a, int) or a.is_contiguous() for a in arguments.values()), kernel.name
    return [arguments[name] for name in names]
