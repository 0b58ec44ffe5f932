"""Types in Triton's interpreter, each made once: for every value it makes the type, its checks and its shape anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_make_block, _make_tensor, _np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype

#: What a block type of an element type and a shape holds, and under ``_of_tensor`` what its tensors hold beside their
#: data; the same of numbers, by type. All of it is only ever read.
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_numbers: dict[str, dict[str, Any]] = {}
_np_dtypes: dict[str, np.dtype[Any]] = {}


@contextmanager
def remembered_types() -> Iterator[None]:
    """Within the block, types that have been made before are not made again: a third of the interpreter's time."""
    found = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = _block_type, _tensor, _numpy_type
    try:
        yield
    finally:
        tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = found


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    extents = [s.value if isinstance(s, tl.constexpr) else s for s in shape]
    key = (element_ty.name, getattr(element_ty, "address_space", None), *extents)
    held = _blocks.get(key)
    if held is None:
        _make_block(self, element_ty, shape)
        held = _blocks[key] = {**vars(self), "_of_tensor": {}}
    vars(self).update(held)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    held = _numbers.setdefault(type.name, {}) if type.__class__ is tl.dtype else vars(type).get("_of_tensor")
    if held:
        vars(self).update(held)
        self.handle, self.type = handle, type
        return
    _make_tensor(self, handle, type)
    if held is not None:
        held.update((name, value) for name, value in vars(self).items() if name not in ("handle", "type"))


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    scalar = dtype.scalar
    if scalar.name not in _np_dtypes:
        _np_dtypes[scalar.name] = _np_dtype(scalar)
    return _np_dtypes[scalar.name]
