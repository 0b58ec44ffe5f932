"""flintc's side of the oracle: a saved checkpoint, opened and bound, run step by step by the reference."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flintc.checkpoint import open_checkpoint
from flintc.ir.build import build
from flintc.ir.lower import lower_attention
from flintc.ir.types import resolve
from flintc.reference import Numerics, rope_table, run
from flintc.spec import spec_for


class Driver:
    """One sequence of at most ``capacity`` tokens.

    rows: most rows of one step; a windowed layer's ring holds the window and these rows.
    lower: run attention as partials and a merge.
    """

    def __init__(self, path: Path, numerics: Numerics, capacity: int = 256, rows: int = 8, lower: bool = False) -> None:
        checkpoint = open_checkpoint(path)
        match = checkpoint.spec_match
        spec = spec_for(match.architecture, match.gguf)
        model = checkpoint.bind(spec)
        graph = build(model, checkpoint.weights_format)
        self.graph = lower_attention(graph, 16) if lower else graph
        self.numerics, self.rows, self.done = numerics, rows, 0
        self.state = dict(checkpoint.load(graph, model, keep_fp32=numerics == "fp32"))
        self.report = checkpoint.report
        self.state["rope_table"] = rope_table(capacity, model.dims["head_dim"], model.numbers["rope_theta"])
        page = spec.numerics.kv_page
        for value in graph.values.values():
            if value.name.startswith("block_table"):
                window = int(value.name.partition(".w")[2] or 0)
                columns = -(-((window - 1 + rows) if window else capacity) // page)
                self.state[value.name] = torch.arange(columns, dtype=torch.int32)[None]
        self._make_caches(capacity, page)

    def _make_caches(self, capacity: int, page: int) -> None:
        dtype = torch.float32 if self.numerics == "fp32" else torch.bfloat16
        for op in self.graph.ops.values():
            if op.kind == "kv_write":
                cache = self.graph.values[op.inputs[2]]
                pages = self.state[op.inputs[5]].shape[1]
                shape = (pages, *(resolve(d, {}) for d in cache.type.shape[1:]))
                self.state[cache.name] = torch.full(shape, torch.nan, dtype=dtype)

    def feed(self, ids: list[int]) -> Tensor:
        """Logits [len(ids), vocab] of the next tokens of the sequence, in steps of up to ``rows`` rows."""
        made = []
        for at in range(0, len(ids), self.rows):
            part = torch.tensor(ids[at : at + self.rows], dtype=torch.int32)
            positions = torch.arange(self.done, self.done + len(part), dtype=torch.int32)
            step = {"ids": part, "positions": positions, "seqs": torch.zeros_like(part)}
            made.append(run(self.graph, self.state | step, self.numerics)["logits"])
            self.done += len(part)
        return torch.cat(made)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """``count`` tokens after ``ids``, one step each from the cache."""
        tokens = [int(self.feed(ids)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.feed(tokens[-1:])[-1].argmax()))
        return tokens
