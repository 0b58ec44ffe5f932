"""Random legal graphs: ops of every kind on values of fitting types, in and out of the shapes the rules look for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphs import Sketch

from flintc.ir.graph import Graph

#: Picks a number below its argument.
Choose = Callable[[int], int]

ROW, HEADS, HEAD = 16, 6, 8
EPS = 1e-6

#: Runs of steps that, on the newest values, make what a rule looks for.
SHAPES = (
    ("add", "norm_sum"),
    ("add", "norm_sum", "router", "topk"),
    ("norm", "router", "topk"),
    ("qkv", "q_norm", "k_norm", "rope", "write"),
    ("qkv", "q_norm", "k_norm", "write"),
    ("partial", "merge"),
    ("expert_up", "expert_silu", "shared_up", "silu"),
    ("expert_up", "expert_silu"),
    ("expert_down", "combine", "shared_down", "sum"),
    ("expert_down", "combine"),
    ("shared_up", "silu"),
)


@dataclass
class Garden:
    """Grows a graph; ``pools`` holds the values of each type, newest last."""

    choose: Choose
    sketch: Sketch = field(default_factory=Sketch)
    pools: dict[str, list[str]] = field(default_factory=dict)
    newest: bool = False

    def __post_init__(self) -> None:
        s = self.sketch
        for name in ("positions", "seqs"):
            s.given(name, "i32", "B")
        s.given("table", "i32", "Q", "T")
        s.given("rope", "f32", "C", 2, HEAD // 2, kind="table")
        self.pools = {"row": [s.given("x", "bf16", "B", ROW), s.given("y", "bf16", "B", ROW)]}
        self.pools["ids"] = [s.given("ids", "i32", "B", 2)]
        self.pools["mix"] = [s.given("mix", "f32", "B", 2)]

    def weight(self, dtype: str, *shape: int) -> str:
        return self.sketch.weight(f"w{len(self.sketch.values)}", dtype, *shape)  # type: ignore[arg-type]

    def pick(self, pool: str) -> str:
        """A value of ``pool``: the newest, or one of the last four."""
        values = self.pools[pool]
        return values[-1] if self.newest else values[-1 - self.choose(min(4, len(values)))]

    def op(self, kind: str, inputs: list[str], pools: str, **attrs: object) -> None:
        n = len(self.sketch.ops)
        names = [f"v{n}.{i}" for i, _ in enumerate(pools.split())]
        self.sketch.op(f"o{n}", kind, inputs, " ".join(names), **attrs)  # type: ignore[arg-type]
        for pool, name in zip(pools.split(), names, strict=True):
            self.pools.setdefault(pool, []).append(name)

    def step(self, kind: str) -> None:
        """Grow one op, unless nothing fits it yet."""
        if all(self.pools.get(pool) for pool in _NEEDS[kind]):
            getattr(self, f"grow_{kind}")()

    def grow_add(self) -> None:
        self.op("add", [self.pick("row"), self.pick("row")], "sum row")

    def grow_norm(self) -> None:
        self.op("norm", [self.pick("row"), self.weight("f32", ROW)], "row", eps=EPS)

    def grow_norm_sum(self) -> None:
        self.op("norm", [self.pick("sum"), self.weight("f32", ROW)], "row", eps=EPS)

    def grow_linear(self) -> None:
        dtype = ("bf16", "nvfp4")[0 if self.newest else self.choose(2)]
        self.op("linear", [self.pick("row"), self.weight(dtype, ROW, ROW)], "row")

    def grow_shared_down(self) -> None:
        """From a row other than the newest, so that it and the newest can be summed."""
        self.op("linear", [self.pools["row"][-2], self.weight("bf16", ROW, ROW)], "row")

    def grow_shared_up(self) -> None:
        self.op("linear", [self.pick("row"), self.weight("bf16", 2 * ROW, ROW)], "wide")

    def grow_silu(self) -> None:
        self.op("silu_mul", [self.pick("wide")], "row")

    def grow_sum(self) -> None:
        second = self.pick("row")
        first = self.pools["row"][-2] if self.newest else self.pick("row")
        self.op("sum", [first, second], "row")

    def grow_qkv(self) -> None:
        weight = self.weight("bf16", HEADS * HEAD, ROW)
        self.op("linear", [self.pick("row"), weight], "qkv", heads=HEADS)

    def grow_q_norm(self) -> None:
        self.op("head_norm", [self.pick("qkv"), self.weight("f32", HEAD)], "q", eps=EPS, heads=(0, 2))

    def grow_k_norm(self) -> None:
        self.op("head_norm", [self.pick("qkv"), self.weight("f32", HEAD)], "k", eps=EPS, heads=(2, 2))

    def grow_rope(self) -> None:
        self.op("rope", [self.pick("q"), self.pick("k"), "positions", "rope"], "q k")

    def grow_write(self) -> None:
        cache = self.sketch.given(f"cache{len(self.sketch.ops)}", "bf16", "P", 2, 2, 8, HEAD, kind="cache")
        inputs = [self.pick("k"), self.pick("qkv"), cache, "positions", "seqs", "table"]
        self.op("kv_write", inputs, "cache", v_heads=(4, 2))

    def grow_partial(self) -> None:
        inputs = [self.pick("q"), self.pick("cache"), "positions", "seqs", "table"]
        self.op("attention_partial", inputs, "o m l", scale=0.5, chunk=8, partials=3)

    def grow_merge(self) -> None:
        inputs = [self.pick("o"), self.pick("m"), self.pick("l"), "positions", "seqs"]
        self.op("attention_merge", inputs, "row", chunk=8, partials=3)

    def grow_router(self) -> None:
        self.op("router", [self.pick("row"), self.weight("f32", 4, ROW)], "logits")

    def grow_topk(self) -> None:
        self.op("topk", [self.pick("logits"), "seqs"], "ids mix", k=2)

    def grow_expert_up(self) -> None:
        inputs = [self.pick("row"), self.pick("ids"), self.weight("bf16", 4, 2 * ROW, ROW)]
        self.op("expert_linear", inputs, "expert_wide", out="f32")

    def grow_expert_silu(self) -> None:
        self.op("silu_mul", [self.pick("expert_wide")], "act")

    def grow_expert_down(self) -> None:
        self.op("expert_linear", [self.pick("act"), self.pick("ids"), self.weight("bf16", 4, ROW, ROW)], "parts")

    def grow_combine(self) -> None:
        self.op("combine", [self.pick("parts"), self.pick("mix")], "row")

    def graph(self) -> Graph:
        """Outputs: everything that nothing reads, and a few values that something does."""
        read = {v for o in self.sketch.ops.values() for v in o.inputs}
        made = [v for o in self.sketch.ops.values() for v in o.outputs]
        return self.sketch.graph(*(v for v in made if v not in read or self.choose(16) == 0))


_NEEDS: dict[str, tuple[str, ...]] = {
    "add": ("row",), "norm": ("row",), "norm_sum": ("sum",), "linear": ("row",), "shared_up": ("row",),
    "shared_down": ("row",),
    "silu": ("wide",), "sum": ("row",), "qkv": ("row",), "q_norm": ("qkv",), "k_norm": ("qkv",), "rope": ("q", "k"),
    "write": ("k", "qkv"), "partial": ("q", "cache"), "merge": ("o",), "router": ("row",), "topk": ("logits",),
    "expert_up": ("row", "ids"), "expert_silu": ("expert_wide",), "expert_down": ("act",),
    "combine": ("parts", "mix"),
}  # fmt: skip


def grow(choose: Choose, size: int) -> Graph:
    """A graph of about ``size`` runs: single ops on random values, and the rules' shapes on the newest ones."""
    garden = Garden(choose)
    kinds = tuple(_NEEDS)
    for _ in range(size):
        garden.newest = choose(2) == 0
        steps = SHAPES[choose(len(SHAPES))] if garden.newest else (kinds[choose(len(kinds))],)
        for kind in steps:
            garden.step(kind)
    garden.newest = False
    return garden.graph()
