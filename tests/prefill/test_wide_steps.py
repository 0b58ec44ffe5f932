"""Wide steps of small models, their kernels interpreted, against the reference: many sequences, a row each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prompts import CONTEXT, divergence, graph_of, make_path, random_ids
from tolerance import assert_close

from flintc.reference import run
from flintc.runtime.prefill.steps import STEP_ROUTINES, StepRows, counters_of, serves_steps

#: Tokens cached before the step: none, the window (13) less one and full, and more than a ring holds.
LENGTHS = (0, 12, 13, 40)
#: As in tests/prefill/test_general_path.py.
MOST_ROWS, MOST_KL, MEAN_KL = 0.8, 4e-3, 0.05


class Wide:
    """A path whose sequences hold ``LENGTHS`` tokens, and a step of the next token of each among padded rows."""

    def __init__(self, spec, weights, padded=2, only=None):
        self.path, self.storage = make_path(spec, weights, CONTEXT, slots=len(LENGTHS))
        self.kv, self.graph = self.path._kv, graph_of(spec, weights)
        slots = [self.kv.add(CONTEXT) for _ in LENGTHS]
        ids = random_ids(self.graph, CONTEXT)
        for slot, length in zip(slots, LENGTHS, strict=True):
            if length:
                list(self.path.chunks(slot, random_ids(self.graph, length, seed=slot + 1)))
        rows = [(ids[-1 - s], self.kv.extend(s, 1).start, s) for s in slots]
        rows = [row if only is None or row[2] == only else (0, 0, -1) for row in rows] + [(0, 0, -1)] * padded
        self.step = self.rows(rows)

    def rows(self, rows):
        columns = [torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True)]
        general = self.path._plan.general
        assert serves_steps(general)
        counters = torch.zeros(counters_of(general, len(rows)), dtype=torch.int32)
        return StepRows(*columns, self.kv.tables, counters)

    @property
    def live(self):
        return self.step.seqs >= 0

    def reference(self):
        """Every activation and cache of the step by the reference, on copies of the caches."""
        given = {
            name: self.path._given._tensors[name] for name in self.graph.values if name in self.path._given._tensors
        }
        caches = {name: tensor.clone() for name, tensor in self.storage.tensors.items()}
        inputs = {"ids": self.step.ids, "positions": self.step.positions, "seqs": self.step.seqs}
        made = tuple(v for op in self.graph.ops.values() for v in op.outputs)
        return run(replace(self.graph, outputs=made), {**given, **caches, **inputs, **self.kv.tables})


@pytest.mark.parametrize("kind", ["heads", "attention"])
def test_a_path_that_lacks_a_step_kernel_serves_no_steps(kind):
    general = make_path("tiny-flint", "bf16", CONTEXT, slots=1)[0]._plan.general
    assert serves_steps(general)
    at = next(i for i, r in enumerate(general.routines) if r.kind == kind)
    kernels = {purpose: name for purpose, name in general.routines[at].kernels.items() if purpose != "step"}
    lacking = replace(general.routines[at], kernels=kernels)
    assert not serves_steps(replace(general, routines=(*general.routines[:at], lacking, *general.routines[at + 1 :])))


@pytest.mark.parametrize(
    ("spec", "weights"), [("short-flint", "bf16"), ("short-flint", "nvfp4"), ("short-other", "bf16")]
)
def test_logits_are_those_of_the_reference(spec, weights):
    wide = Wide(spec, weights)
    want = wide.reference()[wide.graph.outputs[0]]
    got = wide.path.step(wide.step)
    assert got.shape == want.shape and got[wide.live].isfinite().all()
    kl = divergence(want[wide.live], got[wide.live])
    assert kl.quantile(MOST_ROWS) < MOST_KL and kl.mean() < MEAN_KL, kl
    assert not wide.step.counters.any(), "counters are left zero for the next layer"


@pytest.mark.parametrize("spec", ["short-flint", "short-other"])
def test_heads_and_attention_at_their_rounding_points(spec):
    """Each routine on what the reference made before it."""
    wide = Wide(spec, "bf16")
    reference, given = wide.reference(), wide.path._given
    for routine in wide.path._plan.general.routines:
        if routine.kind not in ("heads", "attention"):
            continue
        values = {v: reference[v] for op in routine.ops for v in wide.graph.ops[op].inputs if v in reference}
        STEP_ROUTINES[routine.kind](given, routine, wide.step, values)
        last = wide.graph.ops[routine.ops[-1]]
        if routine.kind == "heads":
            cache = values[last.outputs[0]]
            assert cache.data_ptr() == given.tensor(last.inputs[2]).data_ptr(), "a new version is the same memory"
            want = reference[last.outputs[0]]
            assert torch.equal(cache.isnan(), want.isnan()), "padded rows store nothing, live rows all of theirs"
            assert_close(cache.nan_to_num(), want.nan_to_num(), 2)
            q = next(v for op in routine.ops for v in wide.graph.ops[op].outputs if v == last.inputs[0])
            assert_close(values[q][wide.live], reference[q][wide.live], 2)
        else:
            y = values[last.outputs[0]]
            assert_close(y[wide.live], reference[last.outputs[0]][wide.live], 2, slack=2e-2)
            assert not y[~wide.live].any()


def test_a_row_has_the_bits_that_it_has_among_rows_of_no_sequence():
    together = Wide("short-flint", "bf16")
    got = together.path.step(together.step)
    alone = Wide("short-flint", "bf16", only=3)
    row = int((together.step.seqs == 3).nonzero())
    assert torch.equal(alone.path.step(alone.step)[row], got[row])


def test_rows_of_no_sequence_leave_the_caches_alone():
    wide = Wide("short-flint", "bf16")
    before = {name: tensor.clone() for name, tensor in wide.storage.tensors.items()}
    wide.path.step(replace(wide.step, seqs=torch.full_like(wide.step.seqs, -1)))
    for name, tensor in wide.storage.tensors.items():
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), name


def test_steps_go_on_from_steps():
    """Two tokens more for each sequence: the cache that a wide step leaves is what the next one reads."""
    wide = Wide("short-flint", "bf16", padded=0)
    ids = random_ids(wide.graph, 2 * len(LENGTHS), seed=2)
    wide.path.step(wide.step)
    for turn in range(2):
        rows = [(ids[2 * s + turn], wide.kv.extend(s, 1).start, s) for s in wide.step.seqs.tolist()]
        wide.step = wide.rows(rows)
        want = wide.reference()[wide.graph.outputs[0]]
        kl = divergence(want, wide.path.step(wide.step))
        assert kl.quantile(MOST_ROWS) < MOST_KL and kl.mean() < MEAN_KL, kl
