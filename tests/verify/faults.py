"""Faults that other implementations have had, planted one at a time in what flintc computes; the oracle stays sound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

import flintc.checkpoint.nvfp4 as nvfp4
import flintc.reference.attention as attention
from flintc.bench.subject import Subject, run_prompts
from flintc.ir.graph import Graph, Op, Value
from flintc.reference import Nvfp4
from flintc.reference.nvfp4 import BLOCK, E2M1
from flintc.reference.ops import OPS
from flintc.runtime.executor import Executor, forward

Weights = Mapping[str, Tensor | Nvfp4]
#: Checkpoint a fault needs: BF16, NVFP4, NVFP4 with block scales 0x7F, or a router whose scores are all near 0.
Form = Literal["bf16", "nvfp4", "nvfp4-7f", "low-scores"]


@dataclass
class Faulty(Subject):
    """A subject that computes wrongly: another graph, other weights, another way of running, or smaller steps."""

    edit: Callable[[Graph], Graph] | None = None
    feed: Callable[[Executor, Sequence[Sequence[int]]], list[Tensor]] = run_prompts
    rows: int | None = None

    def graph(self, after: str | None = None) -> Graph:
        graph = super().graph(after)
        return graph if self.edit is None else self.edit(graph)

    def logits(self, backend: str, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        executor = self.executor(backend, max(map(len, prompts)))
        executor.rows = min(executor.rows, self.rows or executor.rows)
        return self.feed(executor, prompts)


@dataclass(frozen=True)
class Fault:
    """``plant`` is active while the subject runs; the other fields change the subject itself."""

    name: str
    form: Form = "bf16"
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    edit: Callable[[Graph], Graph] | None = None
    weights: Callable[[Weights], Weights] | None = None
    feed: Callable[[Executor, Sequence[Sequence[int]]], list[Tensor]] = run_prompts
    #: Tokens of a prompt that it takes to show, where that is more than usual.
    tokens: int = 0
    #: Active while the checkpoint is opened.
    opening: Callable[[], AbstractContextManager[Any]] = nullcontext

    def of(self, subject: Subject, rows: int | None = None) -> Faulty:
        """``subject`` with this fault; ``plant`` is left to the caller."""
        fields = {name: getattr(subject, name) for name, f in Subject.__dataclass_fields__.items() if f.init}
        if self.weights is not None:
            fields["weights"] = self.weights(subject.weights)
        return Faulty(**fields, edit=self.edit, feed=self.feed, rows=rows)


@contextmanager
def op(kind: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """The reference of an op replaced: ``wrong`` gets the right function, then what that would get."""
    right = OPS[kind]
    with patch.dict(OPS, {kind: lambda *inputs, **attrs: wrong(right, *inputs, **attrs)}):
        yield


def window(by: int) -> Callable[[Graph], Graph]:
    """Attention over a window longer by so many positions; the cache is unchanged."""

    def edit(graph: Graph) -> Graph:
        ops = {
            name: replace(o, attrs={**o.attrs, "window": o.attrs["window"] + by})
            if o.kind.startswith("attention") and o.attrs["window"] is not None
            else o
            for name, o in graph.ops.items()
        }
        return replace(graph, ops=ops)

    return edit


def rotated(*layers: int | None) -> Callable[[Graph], Graph]:
    """RoPE on full-attention layers too: on these (None: on all of them; -1: on the last)."""

    def edit(graph: Graph) -> Graph:
        last = max(graph.layers())
        chosen = {last if n == -1 else n for n in layers}
        table = next(v for v in graph.values.values() if v.kind == "table")
        values, ops, renamed = dict(graph.values), {}, {}
        for name, o in graph.ops.items():
            plain = o.kind == "kv_write" and o.attrs["window"] is None
            if plain and (None in chosen or o.layer in chosen):
                q = next(v for p in graph.ops.values() if p.name == f"L{o.layer}.q_norm" for v in p.outputs)
                made = tuple(f"{v}.rotated" for v in (q, o.inputs[0]))
                for new, old in zip(made, (q, o.inputs[0]), strict=True):
                    values[new] = Value(new, graph.values[old].type, "activation", o.layer)
                    renamed[old] = new
                fault = f"L{o.layer}.rope"
                ops[fault] = Op(fault, "rope", (q, o.inputs[0], "positions", table.name), made, {}, o.layer)
            after = o.kind in ("kv_write", "attention_partial", "attention")
            ops[name] = replace(o, inputs=tuple(renamed.get(v, v) for v in o.inputs)) if after else o
        return replace(graph, values=values, ops=ops)

    return edit


def no_sink(right: Callable[..., Any], context: Any, *inputs: Tensor, **attrs: Any) -> Any:
    return right(context, *inputs[:5], **attrs)


def no_sink_in_prefill(right: Callable[..., Any], context: Any, *inputs: Tensor, **attrs: Any) -> Any:
    return right(context, *(inputs[:5] if inputs[0].shape[0] > 1 else inputs), **attrs)


def sink_in_every_split(
    right: Callable[..., Any], context: Any, o: Tensor, m: Tensor, l: Tensor, *rest: Tensor, **attrs: Any
) -> Any:
    *rest, sinks = rest
    return right(context, o, m, l + torch.exp(sinks[:, None] - m), *rest, **attrs)


def merge_with_exp2(o: Tensor, m: Tensor, l: Tensor, sinks: Tensor | None) -> Tensor:
    """The sink's share taken as a power of two."""
    assert sinks is not None
    top = torch.maximum(m.amax(-1), sinks)
    weight = torch.exp(m - top[..., None])
    denominator = (l * weight).sum(-1) + torch.exp2(sinks - top)
    return (o * weight[..., None]).sum(2) / denominator[..., None]


def only_this_step(group: Any) -> Tensor:
    """Visible positions of a windowed layer, none of which an earlier step wrote."""
    seen = _visible(group)
    at = torch.arange(group.start, group.start + group.keys.shape[0])
    own = at >= group.positions.min()
    return seen & own if group.window is not None and len(group.positions) > 1 else seen


_visible = attention._Group._visible


def interleaved_rope(
    right: Callable[..., Any], context: Any, q: Tensor, k: Tensor, positions: Tensor, table: Tensor
) -> Any:
    """Neighbouring channels paired instead of the two halves."""
    cos, sin = table[positions.long()].float()[:, :, None].unbind(1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float()[..., 0::2], x.float()[..., 1::2]
        return context.bf16(torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2))

    return rotate(q), rotate(k)


def large_epsilon(right: Callable[..., Any], context: Any, *inputs: Tensor, **attrs: Any) -> Any:
    ids, raw = right(context, *inputs, **{**attrs, "renormalize": False})
    return ids, raw / (raw.sum(-1, keepdim=True) + 1e-6)


def no_renormalisation(right: Callable[..., Any], context: Any, *inputs: Tensor, **attrs: Any) -> Any:
    return right(context, *inputs, **{**attrs, "renormalize": False})


def packed(change: Callable[[str, Nvfp4], Tensor | Nvfp4]) -> Callable[[Weights], Weights]:
    """Every packed weight changed."""
    return lambda weights: {n: change(n, w) if isinstance(w, Nvfp4) else w for n, w in weights.items()}


def one_scale_for_all_experts(name: str, w: Nvfp4) -> Nvfp4:
    if w.codes.ndim != 3:
        return w
    return replace(w, scale=w.scale.reshape(w.codes.shape[0], -1)[:1, 0].contiguous())


def no_head_scale(name: str, w: Nvfp4) -> Nvfp4:
    """Scaling probabilities rather than logits changes nothing after normalisation: the logits lack their scale."""
    return replace(w, scale=torch.ones_like(w.scale)) if name == "w.head" else w


def swapped_nibbles(name: str, w: Nvfp4) -> Nvfp4:
    assert not w.ordered
    return replace(w, codes=(w.codes >> 4) | (w.codes << 4))


def interleaved_nibbles(name: str, w: Nvfp4) -> Nvfp4:
    """ggml's bytes (value j and value 8 + j) taken for neighbours."""
    assert not w.ordered
    values = torch.stack((w.codes & 15, w.codes >> 4), -1).reshape(*w.codes.shape[:-1], -1, 16)
    low, high = values[..., :8], values[..., 8:]
    return replace(w, codes=(low | (high << 4)).flatten(-2).contiguous())


def recut(executor: Executor, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each prompt, then its second part again on what the rings still hold, as if nothing had been overwritten."""
    made = []
    for ids in prompts:
        kept = len(ids) // 4
        slot = executor.kv.add(len(ids))
        whole = forward(executor, slot, ids)
        with patch.object(executor.kv, "holds", lambda *_: True):
            executor.kv.cut(slot, kept)
        again = forward(executor, slot, ids[kept:])
        executor.kv.finish(slot)
        made.append(torch.cat((whole[:kept], again)))
    return made


def patched(target: object, name: str, wrong: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(target, name, wrong)


def wrong_op(kind: str, wrong: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: op(kind, wrong)


def keep_7f(scales: Tensor) -> Tensor:
    """Scale bytes with the sign masked, 0x7F left as it is."""
    return scales & 0x7F


def with_480(w: Nvfp4) -> Tensor:
    """code * block scale, the bits 0x7F taken for 480."""
    assert not w.ordered
    scales = w.scales.view(torch.float8_e4m3fn).float().nan_to_num(480.0)
    nibbles = torch.stack((w.codes & 15, w.codes >> 4), dim=-1).flatten(-2)
    blocks = torch.tensor(E2M1)[nibbles.int()].view(*w.scales.shape, BLOCK)
    return (blocks * scales[..., None]).flatten(-2).to(torch.bfloat16)


FAULTS = (
    Fault("window one position short", edit=window(-1)),
    Fault("window one position long", edit=window(1)),
    Fault("sinks missing", plant=wrong_op("attention_merge", no_sink)),
    Fault("sinks missing in prefill", plant=wrong_op("attention_merge", no_sink_in_prefill)),
    Fault("sink counted once per split", plant=wrong_op("attention_merge", sink_in_every_split)),
    Fault("power of two for the sink's share of a merge", plant=patched(attention, "_merge", merge_with_exp2)),
    Fault("RoPE on layer 0", edit=rotated(0)),
    Fault("RoPE on layer 1", edit=rotated(1)),
    Fault("RoPE on the last layer", edit=rotated(-1)),
    Fault("RoPE on every layer", edit=rotated(None)),
    Fault("RoPE on neighbouring channels", plant=wrong_op("rope", interleaved_rope)),
    Fault("prompt chunk blind to the window before it", plant=patched(attention._Group, "_visible", only_this_step)),
    Fault("ring reused after a prefix cut", feed=recut, tokens=220),
    Fault("routing weights not renormalised", plant=wrong_op("topk", no_renormalisation)),
    Fault("epsilon 1e-6 when all scores are near 0", "low-scores", plant=wrong_op("topk", large_epsilon)),
    Fault("one scale for all experts", "nvfp4", weights=packed(one_scale_for_all_experts)),
    Fault("output scale applied after softmax", "nvfp4", weights=packed(no_head_scale)),
    Fault("nibbles swapped", "nvfp4", weights=packed(swapped_nibbles)),
    Fault("nibbles interleaved rather than 8 + 8", "nvfp4", weights=packed(interleaved_nibbles)),
    Fault(
        "block scale 0x7F read as 480",
        "nvfp4-7f",
        plant=patched(Nvfp4, "unscaled", with_480),
        opening=patched(nvfp4, "_canonical", keep_7f),
    ),
)
