"""Small copies between host and device that never make the host wait for the step that is running."""

from __future__ import annotations

import torch
from torch import Tensor


class Upload:
    """Writes a device tensor from the host, in stream order."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._staged = torch.empty_like(target, device="cpu").pin_memory()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __call__(self, values: Tensor) -> None:
        """Enqueue the copy of ``values``, of the target's shape; they may be changed as soon as this returns."""
        self._copied.synchronize()  # what is staged may still be on its way
        self._staged.copy_(values)
        self._target.copy_(self._staged, non_blocking=True)
        self._copied.record()


class Download:
    """Reads device tensors [rows] of 32-bit numbers to the host, once what is enqueued before has run."""

    def __init__(self, *sources: Tensor) -> None:
        self._sources = sources
        self._staged = [torch.empty_like(source, device="cpu").pin_memory() for source in sources]
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Enqueue the copies."""
        for source, staged in zip(self._sources, self._staged, strict=True):
            staged.copy_(source, non_blocking=True)
        self._copied.record()

    def wait(self) -> list[Tensor]:
        """The values; valid until the next start."""
        self._copied.synchronize()
        return self._staged
