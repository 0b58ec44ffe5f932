"""One function per kind of op: FP32 arithmetic, rounded exactly where ``flintc.ir.ops`` says.

A function takes the numerics, the op's inputs in port order and its attributes by name, and returns its outputs
in port order. Weights may be BF16, FP32 or NVFP4; every product is formed from exactly widened values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flintc.reference.attention import Span, attention, attention_merge, attention_partial, kv_write
from flintc.reference.context import Context
from flintc.reference.nvfp4 import Nvfp4

Weight = Tensor | Nvfp4


def embed(context: Context, ids: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Rows of ``weight``: [B, hidden]."""
    return (context.bf16(weight[ids.long()]),)


def add(context: Context, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The FP32 sum, and the sum rounded as the next residual."""
    total = x.float() + residual.float()
    return total, context.bf16(total)


def norm(context: Context, x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor]:
    """RMSNorm over the last axis."""
    x = x.float()
    return (context.bf16(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()),)


def head_norm(context: Context, x: Tensor, weight: Tensor, *, eps: float, heads: Span) -> tuple[Tensor]:
    """RMSNorm over the channels of ``heads`` (first, count) of x [B, heads, head_dim]."""
    first, count = heads
    return norm(context, x[:, first : first + count], weight, eps=eps)


def matmul(x: Tensor, weight: Weight) -> Tensor:
    """x [..., K] times the rows of weight [N, K] in FP32; an NVFP4 tensor scale multiplies the FP32 sums."""
    if isinstance(weight, Nvfp4):
        return (x.float() @ weight.unscaled().float().T) * weight.row_scale()
    return x.float() @ weight.float().T


def linear(context: Context, x: Tensor, weight: Weight, *, out: str, heads: int | None) -> tuple[Tensor]:
    """x times weight; with ``heads`` viewed [B, heads, N/heads]."""
    y = context.store(matmul(x, weight), out)
    return (y if heads is None else y.view(y.shape[0], heads, -1),)


def rope(context: Context, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of each head's channels by the angles of the row's position."""
    cos, sin = table[positions.long()].float()[:, :, None].unbind(1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return context.bf16(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))

    return rotate(q), rotate(k)


def router(context: Context, x: Tensor, weight: Tensor) -> tuple[Tensor]:
    """Expert logits, FP32."""
    return (matmul(x, weight),)


def topk(
    context: Context, logits: Tensor, seqs: Tensor, *, k: int, score: str, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """The k largest logits, ties to the lowest index; ids i32 [B, k] best first, weights f32 [B, k].

    Rows of no sequence (seqs -1) choose none: ids -1, weights 0.
    """
    # torch.topk leaves the order of ties open; a stable sort keeps the lower index first.
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    padded = (seqs < 0)[:, None]
    return ids.int().masked_fill(padded, -1), weights.masked_fill(padded, 0.0)


def expert_linear(context: Context, x: Tensor, ids: Tensor, weight: Weight, *, out: str) -> tuple[Tensor]:
    """x ([B, K], or per rank [B, k, K]) times weight[ids]: [B, k, N]; zeros where the id is -1."""
    rows = x if x.ndim == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    y = torch.zeros((*ids.shape, weight.shape[1]), dtype=torch.float32, device=x.device)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        chosen = ids == expert
        y[chosen] = matmul(rows[chosen], weight[expert])
    return (context.store(y, out),)


def silu_mul(context: Context, gate_up: Tensor) -> tuple[Tensor]:
    """silu of the first half of the last axis times the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (context.bf16(torch.nn.functional.silu(gate) * up),)


def combine(context: Context, y: Tensor, weights: Tensor) -> tuple[Tensor]:
    """Weighted sum of y [B, k, N] over its ranks, in rank order."""
    total = torch.zeros_like(y[:, 0], dtype=torch.float32)
    for rank in range(y.shape[1]):
        total = total + weights[:, rank, None] * y[:, rank].float()
    return (context.bf16(total),)


def add_rounded(context: Context, a: Tensor, b: Tensor) -> tuple[Tensor]:
    """The op ``sum``: a + b, rounded."""
    return (context.bf16(a.float() + b.float()),)


#: Kind of op -> its function.
OPS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "embed": embed,
    "add": add,
    "norm": norm,
    "linear": linear,
    "head_norm": head_norm,
    "rope": rope,
    "kv_write": kv_write,
    "attention": attention,
    "attention_partial": attention_partial,
    "attention_merge": attention_merge,
    "router": router,
    "topk": topk,
    "expert_linear": expert_linear,
    "silu_mul": silu_mul,
    "combine": combine,
    "sum": add_rounded,
}
