"""Single kernels on the GPU, given and leaving CPU tensors, as the interpreter is and does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flintc.codegen.aot import compile_kernels
from flintc.ir.plan import Kernel


def load_on_gpu(kernel: Kernel) -> Callable[[tuple[int, int, int], Sequence[Any]], None]:
    """The kernel, compiled for the GPU that is here, as a function of a grid and its arguments.

    What a tensor is a view of travels as a whole and comes back as a whole, so that a stray write shows.
    """
    from flintc.runtime.cuda.driver import PreparedLaunch, load_kernel

    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}"
    torch.zeros(1, device="cuda")  # the driver calls below need torch's context
    loaded = load_kernel(kernel, compile_kernels([kernel], [target])[kernel.name, target])

    def call(grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        whole = {a.untyped_storage().data_ptr(): _bytes(a) for a in args if isinstance(a, Tensor)}
        there = {address: data.cuda() for address, data in whole.items()}
        addresses = [_address(a, there) if isinstance(a, Tensor) else a for a in args]
        launch = PreparedLaunch(loaded, grid, [p.type for p in kernel.params], addresses)
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for address, data in whole.items():
            data.copy_(there[address])

    return call


def _bytes(tensor: Tensor) -> Tensor:
    """All of the memory that ``tensor`` is a view of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


def _address(tensor: Tensor, there: dict[int, Tensor]) -> int:
    storage = tensor.untyped_storage().data_ptr()
    return there[storage].data_ptr() + tensor.data_ptr() - storage
