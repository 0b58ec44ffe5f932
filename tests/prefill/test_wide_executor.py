"""The GPU executor's wide steps without a GPU: its own code, kernels interpreted, a step run where a graph would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prompts import CONTEXT, divergence, graph_of, random_ids, weights_of

from flintc.codegen.general import with_general
from flintc.codegen.planner import plan as plan_of
from flintc.codegen.sampler import with_sampler
from flintc.codegen.selection import MAX_ROWS
from flintc.errors import BackendError
from flintc.ir.types import resolve
from flintc.runtime.cuda import choice, executor, wide
from flintc.runtime.cuda.executor import CudaExecutor
from flintc.runtime.cuda.wide import WideStep, serves_wide, wide_bytes
from flintc.runtime.executor import WideExecutor, forward
from flintc.runtime.prefill.launch import InterpretedLaunch
from flintc.runtime.reference_executor import ReferenceExecutor
from flintc.runtime.sampling import SamplingParams, sample
from flintc.runtime.values import TORCH_DTYPES, for_kernels

SPEC, SLOTS = "short-flint", 5
#: Rows of the steps here: a fast step has two, wide ones four and eight.
FAST, WIDTHS = (1, 2), (4, 8)


class Upload:
    """A copy at once."""

    def __init__(self, target):
        self.target = target

    def __call__(self, values):
        self.target.copy_(values)


class Download:
    """Likewise."""

    def __init__(self, *sources):
        self.sources = self.staged = sources

    def start(self):
        self.staged = [source.clone() for source in self.sources]

    def wait(self):
        return list(self.staged)


class FastStep:
    """What the executor asks of a DeviceStep; runs nothing, since fast steps are not what is tested."""

    def __init__(self, plan, compiled, given, symbols, batches, dependent):
        self.plan, self.tensors, self.batches, self.device = plan, for_kernels(given), batches, torch.device("cpu")
        self.workspace_bytes = 0
        env = {**symbols, "B": batches[-1]}
        self.sampler = {
            n: torch.zeros([resolve(d, env) for d in s.type.shape], dtype=TORCH_DTYPES[s.type.dtype])
            for n, s in plan.sampler.memory.items()
        }

    def value(self, name, rows):
        return torch.zeros(rows, self.plan.graph.values[name].type.shape[1])

    def replay(self, rows, part):
        raise AssertionError("a fast step")


class Graph:
    """A captured step: here it is run."""

    def __init__(self, run):
        self.run, self.replays = run, 0

    def replay(self):
        self.replays += 1
        self.run()


def capture(step, rows, part):
    """As a capture does: a step of no sequence first, its logits where they stay."""
    given = step.inputs.clone()
    step.inputs[2] = -1
    logits = torch.empty_like(step._run(rows, part))
    assert torch.equal(step.inputs[:2], given[:2]), "a step of no sequence moves no rows on"
    step.inputs.copy_(given)
    return Graph(lambda: logits.copy_(step._run(rows, part))), logits


@pytest.fixture
def made(monkeypatch):
    """A CudaExecutor of ``SLOTS`` slots on the CPU."""
    monkeypatch.setattr(executor, "Upload", Upload)
    monkeypatch.setattr(choice, "Upload", Upload)
    monkeypatch.setattr(choice, "Download", Download)
    monkeypatch.setattr(executor, "DeviceStep", FastStep)
    monkeypatch.setattr(executor, "CudaLaunch", lambda kernels, compiled: InterpretedLaunch(kernels))
    monkeypatch.setattr(executor, "free_bytes", lambda device: 1 << 34)
    for module in ("executor", "wide"):
        monkeypatch.setattr(f"flintc.runtime.cuda.{module}.WIDTHS", WIDTHS)
    monkeypatch.setattr(executor, "default_wide_from", lambda graph: 3)
    monkeypatch.setattr(WideStep, "_capture", capture)
    plan = with_general(with_sampler(plan_of(graph_of(SPEC, "bf16"))))
    return CudaExecutor(plan, {}, *given(plan.graph), CONTEXT, SLOTS, FAST)


def given(graph):
    """Weights and tables."""
    made = weights_of(SPEC, "bf16")
    return tuple({n: t for n, t in made.items() if graph.values[n].kind == kind} for kind in ("weight", "table"))


def reference():
    graph = graph_of(SPEC, "bf16")
    return ReferenceExecutor(graph, *given(graph), "rounded", CONTEXT, SLOTS)


def test_tokens_are_chosen_and_the_next_step_goes_on_from_them(made):
    """Greedy and sampled rows, one that torch chooses for, the step ahead, then other rows: against the reference."""
    assert isinstance(made, WideExecutor) and (made.rows, made.wide, made.wide_from) == (2, 5, 3)
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_k=0)]
    slots = [made.kv.add(CONTEXT) for _ in params]
    tokens = [[i] for i in random_ids(graph_of(SPEC, "bf16"), len(slots))]
    for turn in range(3):
        positions = [made.kv.extend(slot, 1).start for slot in slots]
        assert positions == [turn] * 3
        ids = None if turn else [made_[-1] for made_ in tokens]
        chosen = made.choose(ids, positions, slots, params, 250).wait()
        logits = made._wide.step.value(made._logits, 4)[:3]
        want = sample(logits, params, [turn + 1] * 3, 250)
        assert chosen.ids.tolist() == want.ids.tolist() and max(want.ids.tolist()) < 250
        torch.testing.assert_close(chosen.logprobs, want.logprobs, atol=1e-5, rtol=0)
        for row, token in zip(tokens, chosen.ids.tolist(), strict=True):
            row.append(token)
    oracle = reference()
    for row, held in enumerate(tokens):
        want = forward(oracle, oracle.kv.add(CONTEXT), held[:-1])[-1:]
        assert divergence(want, logits[row : row + 1]) < 4e-3
    assert {key: graph.replays for key, (graph, _) in made._wide.step._graphs.items()} == {(4, "tokens"): 3}


def test_a_step_goes_on_from_the_newest_choice_alone(made):
    slots = [made.kv.add(CONTEXT) for _ in range(3)]

    def rows():
        return [1, 2, 3], [made.kv.extend(slot, 1).start for slot in slots], slots

    first = made.choose(*rows(), [SamplingParams()] * 3, None)
    assert made.goes_on(first)
    second = made.choose(None, *rows()[1:], [SamplingParams()] * 3, None)
    assert made.goes_on(second) and not made.goes_on(first)
    made.step(*rows(), logits_rows=[0])
    assert not made.goes_on(second)


def test_a_thread_on_another_device_is_refused(made, monkeypatch):
    """Its current stream would not wait for this model's copies."""
    made._step.device = torch.device("cuda", 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    for call in (
        lambda: made.step([1], [0], [0], logits_rows=[]),
        lambda: made.choose([1], [0], [0], [None], None),
        lambda: made.prompt(0, [1]),
    ):
        with pytest.raises(BackendError, match=r"the model is on cuda:1, and .* is cuda:0 \(call it in a block"):
            call()


def test_logits_of_a_wide_step_and_its_padding(made):
    slots = [made.kv.add(CONTEXT) for _ in range(5)]
    ids = random_ids(graph_of(SPEC, "bf16"), 5)
    positions = [made.kv.extend(slot, 1).start for slot in slots]
    logits = made.step(ids, positions, slots, logits_rows=[4, 0])
    assert list(made._wide.step._graphs) == [(8, "logits")]
    assert made._wide.step.inputs[2].tolist() == [*slots, -1, -1, -1]
    oracle = reference()
    for got, row in zip(logits, (4, 0), strict=True):
        assert divergence(forward(oracle, oracle.kv.add(CONTEXT), [ids[row]]), got[None]) < 4e-3
    with pytest.raises(BackendError, match="a step of 6 rows; the most are 5"):
        made.step([0] * 6, [0] * 6, range(6), logits_rows=[0])


def test_too_few_slots_for_them_no_wide_steps(made):
    plan = made._step.plan
    for slots, batches, wanted in ((2, FAST, None), (2, (1,), None), (SLOTS, FAST, SLOTS + 1)):
        few = CudaExecutor(plan, {}, *given(plan.graph), CONTEXT, slots, batches, wide_from=wanted)
        assert few.wide == 0 and few._wide is None and "wide steps" not in few.memory
    more = CudaExecutor(plan, {}, *given(plan.graph), CONTEXT, SLOTS, FAST, wide_from=SLOTS)
    assert (more.wide, more.wide_from) == (SLOTS, SLOTS)
    assert made.memory["wide steps"] == wide_bytes(plan) > 0
    for part in ("general", "sampler"):
        assert not serves_wide(replace(plan, **{part: None}))


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_where_wide_steps_begin_goes_by_the_weights(weights):
    assert wide.default_wide_from(graph_of(SPEC, weights)) == wide.WIDE_FROM[weights]
    assert MAX_ROWS < wide.WIDE_FROM[weights] <= wide.WIDTHS[-1]
