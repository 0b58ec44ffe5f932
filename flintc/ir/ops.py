"""The primitive ops: ports, output types, rounding points.

An op's output dtype is part of the op. ``infer`` derives output types from input types and attributes, and
raises :class:`OpTypeError` where they do not fit; it is the single place that knows what an op accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType

from flintc.ir.graph import Attr
from flintc.ir.types import Dim, DType, TensorType

Types = tuple[TensorType, ...]
Attrs = Mapping[str, Attr]


class OpTypeError(ValueError):
    """Inputs or attributes do not fit an op."""


@dataclass(frozen=True, slots=True)
class OpDef:
    """Definition of one kind of op.

    ``inputs``/``outputs`` name the ports in order; a port ending in ``?`` may be absent (and is then left out
    at the end). ``attrs`` maps attribute names to defaults; a default of ``...`` makes one required.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr | EllipsisType]
    infer: Callable[[Types, Attrs], Types]
    rounding: str
    doc: str


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise OpTypeError(message)


def _dtype(t: TensorType, allowed: tuple[DType, ...], port: str) -> None:
    _need(t.dtype in allowed, f"{port} is {t}, expected {' or '.join(allowed)}")


def _matrix(weight: TensorType, columns: Dim, port: str = "weight") -> None:
    _need(
        weight.shape[-1] == columns, f"{port} is {weight}: its rows hold {weight.shape[-1]} values, the input {columns}"
    )


def _rank(t: TensorType, rank: int, port: str) -> None:
    _need(len(t.shape) == rank, f"{port} is {t}, expected {rank} dimensions")


def _int(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    _need(isinstance(value, int) and not isinstance(value, bool), f"{name} must be a whole number, not {value!r}")
    assert isinstance(value, int)
    return value


def _window(attrs: Attrs) -> int | None:
    window = attrs["window"]
    if window is not None:
        _need(_int(attrs, "window") > 0, f"window must be positive, not {window!r}")
        assert isinstance(window, int)
        return window
    return None


def _positive(attrs: Attrs, name: str) -> None:
    value = attrs[name]
    _need(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
        f"{name} must be a positive number, not {value!r}",
    )


def _span(attrs: Attrs, name: str, t: TensorType) -> tuple[int, int]:
    """(first, count) of heads taken from a [B, heads, head_dim] tensor."""
    span = attrs[name]
    _need(isinstance(span, tuple) and len(span) == 2, f"{name} must be [first, count], not {span!r}")
    assert isinstance(span, tuple)
    heads = t.shape[1]
    _need(
        isinstance(heads, int) and span[0] >= 0 and span[1] > 0 and span[0] + span[1] <= heads,
        f"{name} {list(span)} does not lie within the {heads} heads of {t}",
    )
    return span[0], span[1]


def _out_dtype(attrs: Attrs) -> DType:
    out = attrs["out"]
    _need(out in ("bf16", "f32"), f"out must be bf16 or f32, not {out!r}")
    return out  # type: ignore[return-value]


def _embed(types: Types, attrs: Attrs) -> Types:
    ids, weight = types
    _rank(ids, 1, "ids")
    _rank(weight, 2, "weight")
    _dtype(ids, ("i32",), "ids")
    _dtype(weight, ("bf16",), "weight")
    return (TensorType("bf16", (*ids.shape, weight.shape[1])),)


def _add(types: Types, attrs: Attrs) -> Types:
    x, residual = types
    _dtype(x, ("bf16",), "x")
    _need(x == residual, f"x is {x}, residual is {residual}: they must agree")
    return TensorType("f32", x.shape), TensorType("bf16", x.shape)


def _norm(types: Types, attrs: Attrs) -> Types:
    x, weight = types
    _positive(attrs, "eps")
    _dtype(x, ("bf16", "f32"), "x")
    _dtype(weight, ("f32",), "weight")
    _rank(weight, 1, "weight")
    _matrix(weight, x.shape[-1])
    return (TensorType("bf16", x.shape),)


def _linear(types: Types, attrs: Attrs) -> Types:
    x, weight = types
    _rank(x, 2, "x")
    _dtype(x, ("bf16",), "x")
    _dtype(weight, ("bf16", "nvfp4"), "weight")
    _rank(weight, 2, "weight")
    _matrix(weight, x.shape[1])
    rows = weight.shape[0]
    heads = attrs["heads"]
    if heads is None:
        return (TensorType(_out_dtype(attrs), (x.shape[0], rows)),)
    _need(
        isinstance(heads, int) and isinstance(rows, int) and heads > 0 and rows % heads == 0,
        f"heads {heads} does not divide the {rows} rows of weight",
    )
    assert isinstance(heads, int) and isinstance(rows, int)
    return (TensorType(_out_dtype(attrs), (x.shape[0], heads, rows // heads)),)


def _head_norm(types: Types, attrs: Attrs) -> Types:
    x, weight = types
    _rank(x, 3, "x")
    _dtype(x, ("bf16",), "x")
    _dtype(weight, ("f32",), "weight")
    _rank(weight, 1, "weight")
    _matrix(weight, x.shape[2])
    _positive(attrs, "eps")
    _, count = _span(attrs, "heads", x)
    return (TensorType("bf16", (x.shape[0], count, x.shape[2])),)


def _rope(types: Types, attrs: Attrs) -> Types:
    q, k, positions, table = types
    for t, port in ((q, "q"), (k, "k")):
        _rank(t, 3, port)
        _dtype(t, ("bf16",), port)
    _dtype(positions, ("i32",), "positions")
    _dtype(table, ("f32",), "table")
    head = q.shape[2]
    _need(
        k.shape[2] == head and isinstance(head, int) and head % 2 == 0,
        f"q is {q}, k is {k}: head sizes must agree and be even",
    )
    assert isinstance(head, int)
    _need(table.shape[1:] == (2, head // 2), f"table is {table}, expected f32[C, 2, {head // 2}] (cosines, sines)")
    return q, k


def _kv_write(types: Types, attrs: Attrs) -> Types:
    k, v, cache, positions, seqs, table = types
    _window(attrs)
    for t, port in ((k, "k"), (v, "v")):
        _rank(t, 3, port)
        _dtype(t, ("bf16",), port)
    for t, port in ((positions, "positions"), (seqs, "seqs"), (table, "table")):
        _dtype(t, ("i32",), port)
    _, count = _span(attrs, "v_heads", v)
    _rank(cache, 5, "cache")
    _need(count == k.shape[1], f"{count} value heads for {k.shape[1]} key heads")
    _need(v.shape[2] == k.shape[2], f"k is {k}, v is {v}: head sizes differ")
    _need(
        cache.shape[1] == 2 and cache.shape[2] == count and cache.shape[4] == k.shape[2],
        f"cache is {cache}, expected [P, 2, {count}, page, {k.shape[2]}]",
    )
    return (cache,)


_ATTENTION_INPUTS = ("q", "cache", "positions", "seqs", "block_table")


def _attention_inputs(types: Types) -> tuple[TensorType, TensorType]:
    q, cache = types[0], types[1]
    _rank(q, 3, "q")
    _dtype(q, ("bf16",), "q")
    _rank(cache, 5, "cache")
    kv = cache.shape[2]
    _need(
        isinstance(q.shape[1], int) and isinstance(kv, int) and q.shape[1] % kv == 0,
        f"{q.shape[1]} query heads are not a multiple of {kv} key heads",
    )
    _need(q.shape[2] == cache.shape[4], f"q is {q}, cache is {cache}: head sizes differ")
    _dtype(cache, ("bf16",), "cache")
    for t, port, rank in zip(types[2:5], _ATTENTION_INPUTS[2:], (1, 1, 2), strict=True):
        _dtype(t, ("i32",), port)
        _rank(t, rank, port)
    return q, cache


def _sinks(types: Types, at: int, heads: Dim) -> None:
    if len(types) > at:
        _dtype(types[at], ("f32",), "sinks")
        _need(types[at].shape == (heads,), f"sinks is {types[at]}, expected f32[{heads}]")


def _flat(rows: Dim, heads: Dim, head: Dim) -> TensorType:
    assert isinstance(heads, int) and isinstance(head, int)
    return TensorType("bf16", (rows, heads * head))


def _attention(types: Types, attrs: Attrs) -> Types:
    q, _ = _attention_inputs(types)
    _window(attrs)
    _positive(attrs, "scale")
    _sinks(types, 5, q.shape[1])
    return (_flat(*q.shape),)


def splits(window: int | None, chunk: int, partials: int | None) -> int:
    """Partials a row can need: at most ``partials`` over the whole context, one for each chunk of a window.

    Chunks start at absolute multiples of ``chunk``, so a window of w positions touches at most (w - 2) // chunk + 2.
    """
    if window is None:
        assert partials is not None
        return partials
    return (window + chunk - 2) // chunk + 1


def _splits(attrs: Attrs) -> int:
    """The same of an op, after checking its attributes."""
    chunk, window = _int(attrs, "chunk"), _window(attrs)
    _need(chunk > 0, f"chunk must be positive, not {chunk}")
    _need(
        (window is None) == (attrs.get("partials") is not None),
        "partials is how many a row has over the whole context: it goes without a window, and only so",
    )
    partials = _int(attrs, "partials") if window is None else None
    _need(partials is None or partials > 0, f"partials must be positive, not {partials}")
    return splits(window, chunk, partials)


def _attention_partial(types: Types, attrs: Attrs) -> Types:
    q, _ = _attention_inputs(types)
    count = _splits(attrs)
    _positive(attrs, "scale")
    rows, heads, head = q.shape
    stat = TensorType("f32", (rows, heads, count))
    return TensorType("f32", (rows, heads, count, head)), stat, stat


def _attention_merge(types: Types, attrs: Attrs) -> Types:
    o, m, l = types[:3]
    _rank(o, 4, "o")
    _need(
        o.dtype == m.dtype == l.dtype == "f32" and m.shape == l.shape == o.shape[:3],
        f"partials are {o}, {m}, {l}: expected f32 with equal leading dimensions",
    )
    count = _splits(attrs)
    _need(o.shape[2] == count, f"o is {o}: its chunk, window and partials make {count} splits")
    _sinks(types, 5, o.shape[1])
    return (_flat(o.shape[0], o.shape[1], o.shape[3]),)


def _router(types: Types, attrs: Attrs) -> Types:
    x, weight = types
    _rank(x, 2, "x")
    _dtype(x, ("bf16",), "x")
    _dtype(weight, ("f32",), "weight")
    _rank(weight, 2, "weight")
    _matrix(weight, x.shape[1])
    return (TensorType("f32", (x.shape[0], weight.shape[0])),)


def _topk(types: Types, attrs: Attrs) -> Types:
    logits, seqs = types
    _rank(logits, 2, "logits")
    _dtype(logits, ("f32",), "logits")
    _dtype(seqs, ("i32",), "seqs")
    _need(seqs.shape == logits.shape[:1], f"logits is {logits}, seqs is {seqs}: leading dimensions must agree")
    k, experts = _int(attrs, "k"), logits.shape[1]
    _need(isinstance(experts, int) and 0 < k <= experts, f"cannot choose {k} of {experts} experts")
    _need(attrs["score"] in ("sigmoid", "softmax"), f"score must be sigmoid or softmax, not {attrs['score']!r}")
    return TensorType("i32", (logits.shape[0], k)), TensorType("f32", (logits.shape[0], k))


def _expert_linear(types: Types, attrs: Attrs) -> Types:
    x, ids, weight = types
    _dtype(x, ("bf16",), "x")
    _dtype(ids, ("i32",), "ids")
    _dtype(weight, ("bf16", "nvfp4"), "weight")
    _rank(ids, 2, "ids")
    _rank(weight, 3, "weight")
    _matrix(weight, x.shape[-1])
    lead = x.shape[:-1]
    _need(lead in (ids.shape, ids.shape[:1]), f"x is {x}, ids is {ids}: leading dimensions must agree")
    return (TensorType(_out_dtype(attrs), (*ids.shape, weight.shape[1])),)


def _silu_mul(types: Types, attrs: Attrs) -> Types:
    (x,) = types
    _dtype(x, ("bf16", "f32"), "gate_up")
    width = x.shape[-1]
    _need(isinstance(width, int) and width % 2 == 0, f"gate_up is {x}: its last dimension must be even")
    assert isinstance(width, int)
    return (TensorType("bf16", (*x.shape[:-1], width // 2)),)


def _combine(types: Types, attrs: Attrs) -> Types:
    y, weights = types
    _rank(y, 3, "y")
    _dtype(y, ("bf16",), "y")
    _dtype(weights, ("f32",), "weights")
    _need(y.shape[:2] == weights.shape, f"y is {y}, weights is {weights}: leading dimensions must agree")
    return (TensorType("bf16", (y.shape[0], y.shape[2])),)


def _sum(types: Types, attrs: Attrs) -> Types:
    a, b = types
    _dtype(a, ("bf16",), "a")
    _need(a == b, f"a is {a}, b is {b}: they must agree")
    return (a,)


OPS: dict[str, OpDef] = {
    d.kind: d
    for d in (
        OpDef(
            "embed",
            ("ids", "weight"),
            ("x",),
            {},
            _embed,
            "none (a copy)",
            "Row of the embedding table for each token id.",
        ),
        OpDef(
            "add",
            ("x", "residual"),
            ("sum", "residual"),
            {},
            _add,
            "sum stays FP32; residual = bf16(sum)",
            "Residual add. The norm that follows reads the unrounded sum.",
        ),
        OpDef(
            "norm",
            ("x", "weight"),
            ("y",),
            {"eps": ...},
            _norm,
            "bf16(x * rsqrt(mean(x^2) + eps) * w)",
            "RMSNorm over the last axis.",
        ),
        OpDef(
            "linear",
            ("x", "weight"),
            ("y",),
            {"out": "bf16", "heads": None},
            _linear,
            "FP32 accumulate, tensor scale on the accumulator, then `out`",
            "x [B, K] times weight [N, K]; with `heads` the output is viewed [B, heads, N/heads].",
        ),
        OpDef(
            "head_norm",
            ("x", "weight"),
            ("y",),
            {"eps": ..., "heads": ...},
            _head_norm,
            "bf16(x * rsqrt(mean(x^2) + eps) * w)",
            "RMSNorm over each head's channels, on heads [first, count] of x.",
        ),
        OpDef(
            "rope",
            ("q", "k", "positions", "table"),
            ("q", "k"),
            {},
            _rope,
            "rotation in FP32, one rounding",
            "NeoX (rotate-half) rotation of all channels by the row's position; "
            "table f32[C, 2, head_dim/2] holds cosines then sines.",
        ),
        OpDef(
            "kv_write",
            ("k", "v", "cache", "positions", "seqs", "block_table"),
            ("cache",),
            {"v_heads": ..., "window": None},
            _kv_write,
            "none (a copy)",
            "Stores each row's keys and values (heads `v_heads` of v) at its position; "
            "rows with seqs = -1 store nothing. A new version of the cache.",
        ),
        OpDef(
            "attention",
            (*_ATTENTION_INPUTS, "sinks?"),
            ("y",),
            {"scale": ..., "window": None},
            _attention,
            "see attention_partial, attention_merge",
            "Attention over the cache; lowered to fixed-size partials and a merge before the baseline.",
        ),
        OpDef(
            "attention_partial",
            _ATTENTION_INPUTS,
            ("o", "m", "l"),
            {"scale": ..., "window": None, "chunk": ..., "partials": None},
            _attention_partial,
            "scores FP32; m running max; l sum of unrounded exp(s-m); "
            "bf16(p) for P.V, FP32 accumulate; o, m, l FP32 and o unnormalised",
            "Chunks are `chunk` absolute positions. Under a window split j of a row covers chunk "
            "max(0, position - window + 1) // chunk + j. Over the whole context, a row of n chunks has "
            "k = min(n, partials) splits, and split j covers chunks j * n // k to (j + 1) * n // k - 1. "
            "Splits that a row does not have are not written.",
        ),
        OpDef(
            "attention_merge",
            ("o", "m", "l", "positions", "seqs", "sinks?"),
            ("y",),
            {"chunk": ..., "window": None, "partials": None},
            _attention_merge,
            "FP32 until one rounding of the output; the sink joins the denominator once",
            "Merges a row's partials in ascending order of split; y is [B, heads*head_dim].",
        ),
        OpDef("router", ("x", "weight"), ("logits",), {}, _router, "FP32 weights, FP32 logits", "Expert logits."),
        OpDef(
            "topk",
            ("logits", "seqs"),
            ("ids", "weights"),
            {"k": ..., "score": "sigmoid", "renormalize": True},
            _topk,
            "FP32",
            "Top-k on the FP32 logits, ties to the lowest index, best first; "
            "then the score of the chosen; then w / (sum(w) + 1e-20). "
            "Rows with seqs = -1 choose none: ids -1, weights 0.",
        ),
        OpDef(
            "expert_linear",
            ("x", "ids", "weight"),
            ("y",),
            {"out": "bf16"},
            _expert_linear,
            "FP32 accumulate, expert scale on the accumulator, then `out`",
            "For each row and rank r, x (shared, or its own [B, k, K]) times weight[ids[row, r]]; "
            "zeros, and no weight read, where the id is -1.",
        ),
        OpDef(
            "silu_mul",
            ("gate_up",),
            ("y",),
            {},
            _silu_mul,
            "bf16(silu(g) * u), FP32 inside",
            "First half of the last axis is the gate, second half up.",
        ),
        OpDef(
            "combine",
            ("y", "weights"),
            ("y",),
            {},
            _combine,
            "bf16 of the FP32 sum in rank order",
            "Weighted sum of the chosen experts.",
        ),
        OpDef("sum", ("a", "b"), ("y",), {}, _sum, "bf16(a + b)", "Elementwise sum."),
    )
}


def infer(kind: str, types: Types, attrs: Attrs) -> Types:
    """Output types of an op of ``kind``; OpTypeError says what does not fit."""
    definition = OPS[kind]
    required = [p for p in definition.inputs if not p.endswith("?")]
    _need(
        len(required) <= len(types) <= len(definition.inputs),
        f"{kind} takes {', '.join(definition.inputs)}; {len(types)} inputs are given",
    )
    for t, port in zip(types, definition.inputs, strict=False):
        _need(len(t.shape) > 0 and 0 not in t.shape, f"{port.removesuffix('?')} is {t}: it holds nothing")
    return definition.infer(types, _complete(definition, attrs))


def _complete(definition: OpDef, attrs: Attrs) -> Attrs:
    """``attrs`` with the defaults of what they leave out."""
    for name in attrs:
        _need(name in definition.attrs, f"{definition.kind} has no attribute {name!r}")
    result: dict[str, Attr] = {}
    for name, default in definition.attrs.items():
        value = attrs.get(name, default)
        if isinstance(value, EllipsisType):
            raise OpTypeError(f"{definition.kind} needs the attribute {name!r}")
        result[name] = value
    return result
