"""The sampler: what the host chooses, from the same logits, numbers and cuts."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from launches import TORCH, Maker, load
from torch import Tensor

from flintc.codegen.planner import plan
from flintc.codegen.sampler import MOST, with_sampler
from flintc.errors import BundleError
from flintc.ir.plan import Plan
from flintc.ir.serialize import plan_from_json, plan_to_json
from flintc.ir.types import resolve
from flintc.runtime.sampling import Sampled, SamplingParams, sample

#: numpy warns of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GREEDY = SamplingParams(temperature=0.0)


@cache
def sampler_of(vocab: int) -> Plan:
    """A plan that makes logits f32[B, vocab] and samples from them."""
    m = Maker()
    for name in ("ids", "positions", "seqs"):
        m.given(name, "i32", "B")
    x, weight = m.given("x", "bf16", "B", 16), m.given("w", "bf16", vocab, 16, kind="weight")
    m.op("linear", (x, weight), ("logits",), out="f32")
    return with_sampler(plan(m.graph("logits")))


def words(params: SamplingParams, vocab: int) -> tuple[int, ...]:
    """How a row chooses, as the kernel reads it."""
    return struct.unpack(
        "<8i", struct.pack("<ddQii", params.temperature, params.top_p, params.seed, params.top_k, vocab)
    )


def choose(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], vocab: int, seqs: Sequence[int] = ()
) -> dict[str, Tensor]:
    """What the kernel leaves in every tensor; ``positions`` are those of the rows, whose tokens take the next."""
    rows, columns = logits.shape
    planned = sampler_of(columns)
    assert planned.sampler is not None
    given = {"logits": logits.contiguous(), "ids": torch.full((rows,), -7), "positions": torch.tensor(positions)}
    tensors = {name: t if name == "logits" else t.int() for name, t in given.items()}
    tensors["seqs"] = torch.tensor(seqs or range(rows), dtype=torch.int32)
    for name, scratch in planned.sampler.memory.items():
        shape = [resolve(d, {"B": rows}) for d in scratch.type.shape]
        poison = 0 if name == "arrivals" else -99
        tensors[name] = torch.full(shape, poison, dtype=TORCH[scratch.type.dtype])
    tensors["requests"].copy_(torch.tensor([words(p, vocab) for p in params]))
    (launch,) = planned.sampler.launches
    x, y, z = (resolve(d, {"B": rows}) for d in launch.grid)
    load(planned.kernels[launch.kernel])((x, y, z), [tensors[a.ref] for a in launch.args])
    assert not tensors["arrivals"].any()
    return tensors


def check(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], vocab: int = 0) -> Sampled:
    """The kernel's choice equals the host's; returns the host's."""
    made = choose(logits, params, positions, vocab or logits.shape[1])
    want = sample(logits, params, [p + 1 for p in positions], vocab or None)
    assert made["tokens"].tolist() == want.ids.tolist()
    # FP32 terms summed in blocks of up to 4096, then one rounding of the logarithm.
    torch.testing.assert_close(made["logprobs"], want.logprobs, atol=1e-6, rtol=1e-6)
    assert made["ids"].tolist() == want.ids.tolist()
    assert made["positions"].tolist() == [p + 1 for p in positions]
    return want


def random(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def varied(rows: int, seed: int) -> list[SamplingParams]:
    """Parameters of every kind that the kernel serves."""
    return [
        SamplingParams(
            temperature=(0.0, 0.3, 1.0, 2.5)[i % 4],
            top_k=(1, 5, 20, MOST)[i // 4 % 4],
            top_p=(1.0, 0.95, 0.5, 0.01)[i // 4 % 3],
            seed=seed * 1_000_003 + i * 2**33,
        )
        for i in range(rows)
    ]


@pytest.mark.parametrize("vocab", [70, 512, 4096, 4097, 10_000])
def test_the_host_and_the_kernel_choose_the_same(vocab: int) -> None:
    rows = 32
    want = check(random(rows, vocab, vocab), varied(rows, vocab), list(range(rows)), vocab)
    assert len(set(want.ids.tolist())) > 8


def test_many_draws_from_few_tokens() -> None:
    """A flat distribution, so that a wrong number or a wrong sum changes the token."""
    params = [SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=s * 7919) for s in range(60)]
    want = check(random(60, 100, 1, 0.1), params, [3 * s for s in range(60)])
    assert len(set(want.ids.tolist())) > 20


@pytest.mark.parametrize("vocab", [1, 5, 300, 5000])
def test_padded_ids_are_never_chosen(vocab: int) -> None:
    """Padding holds the largest logits; with a vocabulary of 1 nothing else can be chosen."""
    logits = random(16, 5100, 2)
    logits[:, vocab:] += 100.0
    want = check(logits, varied(16, 3), list(range(16)), vocab)
    assert int(want.ids.max()) < vocab


def test_equal_logits_keep_the_lowest_ids() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, 8000:] = 1.0
    logits[1, 100::2] = 2.0
    logits[2, ::3] = -0.0
    params = [GREEDY, SamplingParams(top_k=3, top_p=1.0, seed=5), SamplingParams(top_k=MOST, top_p=1.0, seed=6)]
    want = check(logits, params, [0, 1, 2])
    assert want.ids[0] == 8000
    assert want.ids[1] in (100, 102, 104)
    assert want.ids[2] < MOST


def test_all_of_the_best_in_one_block() -> None:
    """The 64 best ids lie in the last block of several."""
    logits = random(4, 12_000, 4)
    logits[:, 11_900:11_990] += 50.0
    check(logits, [SamplingParams(top_k=MOST, top_p=1.0, temperature=9.0, seed=s) for s in range(4)], [5, 6, 7, 8])


def test_extreme_temperatures_and_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0], [1e-30, 2e-30, 0.0, -1e-30], [88.0, -104.0, 87.9, 0.0]])
    for temperature in (1e-300, 1e-6, 1.0, 1e300):
        check(logits, [SamplingParams(temperature=temperature, top_k=4, top_p=1.0, seed=1)] * 3, [0, 1, 2])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 4500, 4999])
def test_a_broken_logit_is_told(broken: float, at: int) -> None:
    """Anywhere in the row, padding included; other rows are not concerned."""
    logits = random(3, 5000, 5)
    logits[1, at] = broken
    made = choose(logits, [GREEDY] * 3, [0, 1, 2], 4600)
    assert made["tokens"][1] == -1
    assert made["ids"][1] == 0
    assert [int(made["tokens"][i]) for i in (0, 2)] == [int(logits[i, :4600].argmax()) for i in (0, 2)]


def test_padded_rows_are_left_alone() -> None:
    made = choose(random(4, 600, 6), [GREEDY] * 4, [5, 6, 7, 8], 600, seqs=(3, -1, 0, -1))
    assert made["positions"].tolist() == [6, 6, 8, 8]
    assert made["ids"][1] == made["ids"][3] == -7
    assert made["tokens"][1] == made["tokens"][3] == -99


def test_large_seeds_and_positions() -> None:
    params = [SamplingParams(temperature=1.0, top_k=MOST, top_p=1.0, seed=s) for s in (0, 1, 2**32, 2**63, 2**64 - 1)]
    logits = random(1, 200, 7, 0.1).expand(5, -1)
    for position in (0, 262_143, 2**31 - 2):
        check(logits, params, [position] * 5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, params = random(8, 5000, 8), varied(8, 9)
    together = choose(logits, params, list(range(8)), 4900)
    for i in range(8):
        alone = choose(logits[i : i + 1], params[i : i + 1], [i], 4900)
        assert torch.equal(alone["tokens"], together["tokens"][i : i + 1])
        assert torch.equal(alone["logprobs"], together["logprobs"][i : i + 1])


def test_its_launch_is_no_launch_of_the_step() -> None:
    planned = sampler_of(100)
    assert planned.sampler is not None
    assert [x.name for x in planned.launches] == [x.name for x in planned.graph.launches]
    assert len(planned.sampler.launches) == 1
    kernel = planned.kernels[planned.sampler.launches[0].kernel]
    assert not kernel.waits
    assert not any(effect.kind in ("wait", "trigger") for path in kernel.paths for effect in path)


def test_it_survives_json_but_not_a_kernel_that_waits() -> None:
    planned = sampler_of(100)
    data = json.loads(json.dumps(plan_to_json(planned)))
    assert plan_from_json(data) == planned
    data["kernels"][-1]["waits"] = True
    with pytest.raises(BundleError, match=r"sampler.*must not wait"):
        plan_from_json(data)
