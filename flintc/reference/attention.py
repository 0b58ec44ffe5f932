"""Reference of the ops around the KV cache: writing it, attending to it, merging partials.

Rows are handled per sequence: the keys and values that a group of rows can see are gathered from their pages once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flintc.ir.ops import splits
from flintc.reference.context import Context

Span = tuple[int, int]
#: Scores held at once; bounds memory for long prompts.
MAX_SCORES = 1 << 26


def kv_write(
    context: Context,
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    positions: Tensor,
    seqs: Tensor,
    block_table: Tensor,
    *,
    v_heads: Span,
    window: int | None,
) -> tuple[Tensor]:
    """Write rows with seqs >= 0 into ``cache`` in place and return it as the new version.

    In place is sound because versions of a cache form a line: nothing reads an older one afterwards.
    """
    live = seqs >= 0
    at = positions[live].long()
    pages = _pages(block_table[seqs[live].long()], at[:, None], cache.shape[3], window)[:, 0]
    first, count = v_heads
    slots = at % cache.shape[3]
    cache[pages, 0, :, slots] = k[live].to(cache.dtype)
    cache[pages, 1, :, slots] = v[live, first : first + count].to(cache.dtype)
    return (cache,)


def attention(
    context: Context,
    q: Tensor,
    cache: Tensor,
    positions: Tensor,
    seqs: Tensor,
    block_table: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None,
) -> tuple[Tensor]:
    """Attention with all of a row's keys in one partial: y [B, heads*head_dim]; zeros on padded rows."""
    y = q.new_zeros(q.shape, dtype=torch.float32)
    for group in _groups(q, cache, positions, seqs, block_table, window, align=1):
        o, m, l = group.partials(context, scale, chunk=group.keys.shape[0])
        y[group.rows] = _merge(o, m, l, sinks)
    return (context.bf16(y.flatten(1)),)


def attention_partial(
    context: Context,
    q: Tensor,
    cache: Tensor,
    positions: Tensor,
    seqs: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int | None,
    chunk: int,
    partials: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Partials o [B, heads, S, head_dim], m and l [B, heads, S]. Splits that no kernel writes are NaN."""
    count = splits(window, chunk, partials)
    rows, heads, head_dim = q.shape
    o = q.new_full((rows, heads, count, head_dim), torch.nan, dtype=torch.float32)
    m = q.new_full((rows, heads, count), torch.nan, dtype=torch.float32)
    l = m.clone()
    for group in _groups(q, cache, positions, seqs, block_table, window, align=chunk):
        whole = group.partials(context, scale, chunk)
        first = _first_chunk(group.positions, window, chunk)
        for row, chunks in _row_chunks(group, first, chunk):
            own = _runs(*(t[row, :, chunks] for t in whole), most=count)
            for target, source in zip((o, m, l), own, strict=True):
                target[group.rows[row], :, : source.shape[1]] = source
    return o, m, l


def _runs(o: Tensor, m: Tensor, l: Tensor, *, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Partials of a row's n chunks, [heads, n, ...], joined to ``most`` runs of chunks if n is more."""
    n = m.shape[1]
    if n <= most:
        return o, m, l
    run = torch.arange(most, device=m.device)
    length = (run + 1) * n // most - run * n // most
    of_chunk = torch.repeat_interleave(run, length).expand_as(m)
    top = m.new_full((m.shape[0], most), -torch.inf).scatter_reduce(1, of_chunk, m, "amax")
    weight = torch.exp(m - top.gather(1, of_chunk))
    sums = m.new_zeros(top.shape).index_add(1, of_chunk[0], l * weight)
    return o.new_zeros((*top.shape, o.shape[2])).index_add(1, of_chunk[0], o * weight[..., None]), top, sums


def attention_merge(
    context: Context,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    positions: Tensor,
    seqs: Tensor,
    sinks: Tensor | None = None,
    *,
    chunk: int,
    window: int | None,
    partials: int | None,
) -> tuple[Tensor]:
    """Merge the partials each row has: y [B, heads*head_dim]; zeros on padded rows."""
    written = positions // chunk - _first_chunk(positions, window, chunk) + 1
    written = torch.where(seqs >= 0, written, 0).clamp(max=m.shape[2])
    unwritten = torch.arange(m.shape[2], device=m.device) >= written[:, None, None]
    y = _merge(
        o.masked_fill(unwritten[..., None], 0.0),
        m.masked_fill(unwritten, -torch.inf),
        l.masked_fill(unwritten, 0.0),
        sinks,
    )
    y = torch.where((seqs >= 0)[:, None, None], y, 0.0)
    return (context.bf16(y.flatten(1)),)


def _merge(o: Tensor, m: Tensor, l: Tensor, sinks: Tensor | None) -> Tensor:
    """Normalised output [n, heads, head_dim] of partials [n, heads, splits, ...]; the sink joins once."""
    top = m.amax(-1)
    if sinks is not None:
        # exp(sink - m) overflows FP32 for a sink far above the scores: rescale by the larger of the two.
        top = torch.maximum(top, sinks.float())
    weight = torch.exp(m - top[..., None])
    denominator = (l * weight).sum(-1)
    if sinks is not None:
        denominator = denominator + torch.exp(sinks.float() - top)
    return (o * weight[..., None]).sum(2) / denominator[..., None]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one sequence with the keys and values at positions ``start``, ``start + 1``, ...

    rows: [n] row numbers; positions: [n]; q: f32 [n, heads, head_dim]; keys, values: f32 [L, kv_heads, head_dim].
    """

    rows: Tensor
    positions: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor
    start: int
    window: int | None

    def partials(self, context: Context, scale: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        """(o, m, l) per ``chunk`` keys: [n, heads, L/chunk, head_dim] and twice [n, heads, L/chunk].

        A chunk of which a row sees nothing has m = -inf and l = 0.
        """
        n, head_dim = self.q.shape[0], self.q.shape[2]
        length, kv_heads, _ = self.keys.shape
        scores = torch.einsum("nkgd,lkd->nkgl", self.q.view(n, kv_heads, -1, head_dim), self.keys) * scale
        scores = scores.masked_fill(~self._visible()[:, None, None], -torch.inf)
        scores = scores.view(*scores.shape[:-1], length // chunk, chunk)
        m = scores.amax(-1)
        p = torch.exp(scores - m.clamp(min=torch.finfo(torch.float32).min)[..., None])
        l = p.sum(-1)
        values = self.values.view(length // chunk, chunk, kv_heads, head_dim)
        o = torch.einsum("nkgsc,sckd->nkgsd", context.bf16(p).float(), values)
        return o.flatten(1, 2), m.flatten(1, 2), l.flatten(1, 2)

    def _visible(self) -> Tensor:
        """[n, L]: whether a row attends to a position: not after its own, and not before its window."""
        at = torch.arange(self.start, self.start + self.keys.shape[0], device=self.keys.device)
        distance = self.positions[:, None] - at
        return (distance >= 0) & (distance < self.window) if self.window is not None else distance >= 0


def _groups(
    q: Tensor, cache: Tensor, positions: Tensor, seqs: Tensor, block_table: Tensor, window: int | None, align: int
) -> Iterator[_Group]:
    """Live rows by sequence, cut where their scores would exceed MAX_SCORES.

    Keys start and stop at multiples of ``align``.
    """
    for seq in sorted(set(seqs[seqs >= 0].tolist())):
        rows = (seqs == seq).nonzero()[:, 0]
        longest = int(positions[rows].max()) + 1
        for part in rows.split(max(1, MAX_SCORES // (q.shape[1] * longest))):
            at = positions[part].long()
            seen = (0 if window is None else max(0, int(at.min()) - window + 1)), int(at.max())
            start = seen[0] // align * align
            stop = (seen[1] // align + 1) * align
            kv = _gather(cache, block_table[seq], range(start, stop), seen, window)
            yield _Group(part, at, q[part].float(), kv[:, 0], kv[:, 1], start, window)


def _gather(cache: Tensor, table: Tensor, span: range, seen: Span, window: int | None) -> Tensor:
    """Keys and values of the positions in ``span``: f32 [len(span), 2, kv_heads, head_dim].

    Positions outside ``seen`` (first, last) only fill up a chunk; they repeat its ends, so that what an unwritten
    or reused slot holds is never read.
    """
    at = torch.arange(span.start, span.stop, device=cache.device).clamp(*seen)
    pages = _pages(table, at, cache.shape[3], window)
    return cache[pages, :, :, at % cache.shape[3]].float()


def _pages(table: Tensor, at: Tensor, page: int, window: int | None) -> Tensor:
    """Page of each position ``at``, looked up along the last axis of ``table``: a ring under a window."""
    column = at // page
    if window is not None:
        column = column % table.shape[-1]
    return torch.gather(table.long(), -1, column)


def _first_chunk(positions: Tensor, window: int | None, chunk: int) -> Tensor:
    """Chunk that holds the first position each row sees."""
    if window is None:
        return torch.zeros_like(positions)
    return (positions - window + 1).clamp(min=0) // chunk


def _row_chunks(group: _Group, first: Tensor, chunk: int) -> Iterator[tuple[int, slice]]:
    """Per row of ``group``: its index, and which of the group's chunks it has."""
    base = group.start // chunk
    for row, (position, begin) in enumerate(zip(group.positions.tolist(), first.tolist(), strict=True)):
        yield row, slice(begin - base, position // chunk + 1 - base)
