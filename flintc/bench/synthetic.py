"""Random weights, caches and step inputs of a graph, made where they are used: for timing models nobody can download.

Values are drawn so that activations stay near one through all layers and no two tensors, pages or rows are equal:
a benchmark on repeated data times the cache, one on zeros times nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flintc.ir.graph import Graph, Value
from flintc.ir.types import resolve
from flintc.reference.nvfp4 import BLOCK, Nvfp4
from flintc.reference.rope import rope_table

#: E4M3 bit patterns of block scales between 0.5 and 1.875, the range that a sound quantiser uses most.
_SCALE_BITS = (0x30, 0x40)
#: Root mean square of a code times a block scale, both uniform over what is drawn here.
_PACKED_RMS = 3.0


def tensors(
    graph: Graph, symbols: Mapping[str, int], theta: float, device: str, seed: int
) -> dict[str, Tensor | Nvfp4]:
    """Every weight, table, first cache version and input of ``graph``, by value name, on ``device``.

    ``symbols`` gives every run-time symbol, ``B`` as the largest batch. Block tables are a random permutation of the
    pages; the other inputs are zero and for the caller to fill.
    """
    generator = torch.Generator(device).manual_seed(seed)
    made = {v for op in graph.ops.values() for v in op.outputs}
    result: dict[str, Tensor | Nvfp4] = {}
    for value in graph.values.values():
        if value.name in made:
            continue
        shape = tuple(resolve(d, symbols) for d in value.type.shape)
        if value.kind == "weight":
            result[value.name] = _weight(value, shape, generator)
        elif value.kind == "table":
            result[value.name] = rope_table(shape[0], 2 * shape[2], theta, device)
        elif value.kind == "cache":
            result[value.name] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        elif value.name.startswith("block_table"):
            pages = torch.randperm(shape[0] * shape[1], generator=generator, device=device)
            result[value.name] = pages.to(torch.int32).view(shape)
        else:
            result[value.name] = torch.zeros(shape, dtype=torch.int32, device=device)
    return result


def _weight(value: Value, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | Nvfp4:
    device = generator.device
    if value.type.dtype == "nvfp4":
        return _packed(shape, generator)
    if len(shape) == 1:
        # Norm weights near one; a vector of sinks takes the same spread, which is as good as any.
        return torch.empty(shape, device=device).normal_(1.0, 0.1, generator=generator)
    dtype = torch.float32 if value.type.dtype == "f32" else torch.bfloat16
    weight = torch.empty(shape, dtype=dtype, device=device)
    return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)


def _packed(shape: tuple[int, ...], generator: torch.Generator) -> Nvfp4:
    *rows, columns = shape
    device = generator.device
    codes = torch.empty((*rows, columns // 2), dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
    scales = torch.empty((*rows, columns // BLOCK), dtype=torch.uint8, device=device)
    scales.random_(*_SCALE_BITS, generator=generator)
    stacked = tuple(rows[:-1]) or (1,)
    spread = torch.empty(stacked, device=device).uniform_(0.5, 1.5, generator=generator)
    # Random bits are as good in the order of kernels, in which a GPU keeps them.
    return Nvfp4(codes, scales, spread * columns**-0.5 / _PACKED_RMS, ordered=device.type == "cuda")
