"""A whole model on the generated kernels: as near to FP32 as the torch reference, and no row sees another."""

from dataclasses import replace

import pytest
import torch

import flintc
from flintc import api
from flintc.errors import VerificationError
from flintc.runtime.interpret_executor import InterpretExecutor

#: A dense layer that sees everything and a windowed MoE layer: one of each kernel, few programs of each. Products are
#: wide enough for a lone row to be cut into slices.
SPEC = """\
flintc: 1
name: nano
extends: tiny-flint
match: {architectures: [FlintForCausalLM], gguf: flint}
dimensions:
  layers: {default: 2}
  hidden: {default: 256}
  vocab: {default: 96}
  heads: {default: 2}
  kv_heads: {default: 1}
  head_dim: {default: 16}
  dense_width: {default: 64}
  experts: {default: 4}
  experts_per_token: {default: 2}
  expert_width: {default: 64}
  shared_width: {default: 32}
layer_sets:
  full: {default: [0]}
  unrotated: {default: [0]}
  dense: {default: [0]}
"""
IDS = torch.randint(0, 96, (18,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("spec") / "nano.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def folder(spec, tmp_path_factory):
    path = tmp_path_factory.mktemp("interpret") / "checkpoint"
    api.synth(spec, path)
    return path


@pytest.fixture(scope="module")
def model(folder, spec):
    return flintc.load(folder, spec=spec, backend="interpret")


@pytest.fixture(scope="module")
def logits(model):
    """Logits of IDS, in slices of eight rows of one sequence."""
    return model.forward(IDS)


def test_as_near_to_fp32_as_the_reference(folder, spec, logits):
    exact = flintc.load(folder, spec=spec, numerics="fp32").forward(IDS)
    reference = flintc.load(folder, spec=spec).forward(IDS)
    ours, theirs = ((x - exact).square().mean().sqrt().item() for x in (logits, reference))
    assert theirs > 0
    assert ours <= 1.5 * theirs
    assert (logits - reference).square().mean().sqrt() <= 1.5 * theirs


def test_one_call_per_launch(model):
    plan, before = model.executor._plan, model.executor.calls
    assert {x.name for x in plan.launches if plan.kernels[x.kernel].several} >= {
        "L0.qkv",
        "L0.gate_up",
        "L1.expert_down",
    }
    model.forward(IDS[:3])
    assert model.executor.calls - before == len(plan.launches) == 9 + 10 + 3


def test_slices_of_eight_rows_give_the_bits_of_single_rows(model, logits, monkeypatch):
    monkeypatch.setattr(model.executor, "rows", 1)
    assert torch.equal(model.forward(IDS[:15]), logits[:15])


def test_a_batch_gives_each_request_what_it_gets_alone(model):
    prompts = [IDS[:12], IDS[5:6], IDS[10:16]]  # three rows are padded up to four
    options = [{"seed": 1, "max_tokens": 3}, {"temperature": 0.0, "max_tokens": 3}, {"seed": 2, "max_tokens": 2}]
    together = model.generate_batch(prompts, options)
    assert together == [model.generate(p, **o) for p, o in zip(prompts, options, strict=True)]
    assert together[0].path == "interpret"


def test_decoding_gives_the_bits_of_the_prompt(model, logits):
    kv, step = model.executor.kv, model.executor.step
    slot = kv.add(18)
    try:
        for start, rows in ((0, 8), (8, 4)):
            kv.extend(slot, rows)
            step(IDS[start : start + rows], range(start, start + rows), [slot] * rows, logits_rows=[0])
        for position in range(12, 15):
            kv.extend(slot, 1)
            assert torch.equal(step([IDS[position]], [position], [slot], logits_rows=[0])[0], logits[position])
    finally:
        kv.finish(slot)


def test_arrival_counters_end_at_zero(model, logits):
    assert not any(counters.any() for counters in model.executor._scratch.values())


@pytest.mark.parametrize("dropped", ["embed", "L0.gate_up", "L1.attention"])
def test_what_no_launch_writes_is_noticed(model, dropped):
    executor = model.executor
    launches = tuple(x for x in executor._plan.launches if x.name != dropped)
    assert len(launches) == len(executor._plan.launches) - 1
    broken = InterpretExecutor(replace(executor._plan, launches=launches), *_given(executor), 32, 1)
    with pytest.raises(VerificationError, match="logits of position 1 are not finite"):
        flintc.Model(broken, 96, model._tokenizer).generate(IDS[:2], max_tokens=1)


def _given(executor):
    tables = {"rope_table": executor._given["rope_table"]}
    return {name: t for name, t in executor._given.items() if name not in tables}, tables
