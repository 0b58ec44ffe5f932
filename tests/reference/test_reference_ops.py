"""Each op of the reference against FP64 arithmetic or values worked out by hand, rounding points included."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flintc.ir.graph import Attr, Op
from flintc.ir.ops import OPS as DEFINITIONS
from flintc.reference import Context, Numerics, Nvfp4, run_op
from flintc.reference.nvfp4 import E2M1
from flintc.reference.ops import OPS


def call(kind: str, *inputs: Tensor | Nvfp4, numerics: Numerics = "rounded", **attrs: Attr) -> tuple[Tensor, ...]:
    names = tuple(f"i{n}" for n in range(len(inputs)))
    outputs = tuple(f"o{n}" for n in range(len(DEFINITIONS[kind].outputs)))
    made = run_op(Op(kind, kind, names, outputs, attrs), dict(zip(names, inputs, strict=True)), Context(numerics))
    return tuple(made[o] for o in outputs)


#: Sequence slot of the one row of a step.
SLOT = torch.zeros(1, dtype=torch.int32)


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded_from(got: Tensor, exact: Tensor) -> None:
    """``got`` is BF16 and the nearest to ``exact`` (FP64), but for ties that FP32 arithmetic decides."""
    assert got.dtype == torch.bfloat16
    spacing = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp(min=1e-30))) - 7)
    assert ((got.double() - exact).abs() <= spacing * (0.5 + 1e-3)).all()


def test_every_op_has_a_function() -> None:
    assert OPS.keys() == DEFINITIONS.keys()


def test_add_keeps_the_sum_unrounded() -> None:
    x, residual = torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0**-9]]).bfloat16()
    total, rounded = call("add", x, residual)
    assert total.dtype == torch.float32 and total.item() == 1.0 + 2.0**-9
    assert rounded.dtype == torch.bfloat16 and rounded.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    x, weight = bf16(5, 96).to(dtype) + (1e-3 if dtype == torch.float32 else 0), bf16(96, seed=1).float()
    (y,) = call("norm", x, weight, eps=1e-2)
    wide = x.double()
    assert_rounded_from(y, wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double())


def test_head_norm_takes_its_heads_only() -> None:
    x, weight = bf16(3, 6, 16), bf16(16, seed=1).float()
    (y,) = call("head_norm", x, weight, eps=1e-6, heads=(1, 2))
    wide = x[:, 1:3].double()
    assert_rounded_from(y, wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())


def test_linear_accumulates_in_fp32_and_rounds_once() -> None:
    """4096 + 1 - 4096: BF16 partial sums would lose the one."""
    x = torch.tensor([[4096.0, 1.0, -4096.0]]).bfloat16()
    (y,) = call("linear", x, torch.ones(2, 3).bfloat16())
    assert y.dtype == torch.bfloat16 and y.tolist() == [[1.0, 1.0]]
    x, weight = bf16(4, 64), bf16(24, 64, seed=1)
    exact = x.double() @ weight.double().T
    assert_rounded_from(call("linear", x, weight)[0], exact)
    wide = call("linear", x, weight, out="f32")[0]
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, atol=1e-5, rtol=1e-5)


def test_linear_views_heads_row_major() -> None:
    x, weight = bf16(2, 8), bf16(12, 8, seed=1)
    flat, viewed = call("linear", x, weight)[0], call("linear", x, weight, heads=3)[0]
    assert viewed.shape == (2, 3, 4) and torch.equal(viewed.reshape(2, 12), flat)


def nvfp4(rows: int, columns: int, scale: Tensor) -> tuple[Nvfp4, Tensor]:
    """A packed weight with its FP64 values worked out code by code."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    scales = torch.randint(0, 127, (rows, columns // 16), generator=generator).to(torch.uint8)
    exact = torch.empty(rows, columns, dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            exact[r, c] = E2M1[codes[r, c]] * e4m3(int(scales[r, c // 16]))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return Nvfp4(packed, scales, scale), exact


def e4m3(bits: int) -> float:
    exponent, fraction = bits >> 3 & 15, bits & 7
    return fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)


def test_nvfp4_dequantises_exactly() -> None:
    weight, exact = nvfp4(8, 64, torch.tensor([0.37]))
    assert weight.shape == (8, 64)
    assert torch.equal(weight.unscaled().double(), exact)
    assert torch.equal(weight.dequantize(), exact.float() * 0.37)


def test_nvfp4_scale_multiplies_the_accumulator() -> None:
    rows = torch.linspace(0.1, 0.9, 8)
    weight, exact = nvfp4(8, 64, rows)
    x = bf16(3, 64)
    expected = (x.double() @ exact.T) * rows.double()
    wide = call("linear", x, weight, out="f32")[0]
    torch.testing.assert_close(wide.double(), expected, atol=1e-3, rtol=1e-5)
    single = call("linear", x, Nvfp4(weight.codes, weight.scales, rows[:1]), out="f32")[0]
    torch.testing.assert_close(single[:, 0], wide[:, 0])


def test_nvfp4_experts_keep_their_own_scale() -> None:
    weight, exact = nvfp4(8, 64, torch.ones(1))
    stacked = Nvfp4(weight.codes.view(2, 4, -1), weight.scales.view(2, 4, -1), torch.tensor([1.0, 0.25]))
    x, ids = bf16(1, 64), torch.tensor([[1, 0]]).int()
    (y,) = call("expert_linear", x, ids, stacked, out="f32")
    expected = x.double() @ exact.T
    torch.testing.assert_close(y[0, 0].double(), expected[0, 4:] * 0.25, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(y[0, 1].double(), expected[0, :4], atol=1e-3, rtol=1e-5)
    for scale in (torch.rand(2, 4), torch.rand(2), torch.rand(1), torch.rand(())):
        whole = Nvfp4(stacked.codes, stacked.scales, scale)
        assert torch.equal(whole[1].dequantize(), whole.dequantize()[1])


def test_nvfp4_refuses_parts_that_do_not_fit() -> None:
    weight, _ = nvfp4(8, 64, torch.ones(1))
    with pytest.raises(ValueError, match="scales"):
        Nvfp4(weight.codes, weight.scales[:, :3], weight.scale)
    with pytest.raises(ValueError, match="scale is"):
        Nvfp4(weight.codes, weight.scales, torch.ones(3))
    with pytest.raises(ValueError, match="dtypes"):
        Nvfp4(weight.codes.int(), weight.scales, weight.scale)


def test_rope_rotates_halves() -> None:
    """Channel i pairs with channel i + head_dim/2; each pair turns by its own angle of the row's position."""
    table = torch.zeros(4, 2, 2)
    table[:, 0] = 1.0
    table[3] = torch.tensor([[0.0, math.cos(0.5)], [1.0, math.sin(0.5)]])
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).bfloat16().repeat(2, 1, 1)
    k = 2 * q
    rotated, rotated_k = call("rope", q, k, torch.tensor([3, 0]).int(), table)
    a, b = math.cos(0.5), math.sin(0.5)
    assert_rounded_from(rotated[0, 0], torch.tensor([-3.0, 2 * a - 4 * b, 1.0, 4 * a + 2 * b]).double())
    assert torch.equal(rotated[1], q[1]) and torch.equal(rotated_k, 2 * rotated)


def test_router_is_fp32_throughout() -> None:
    """Two experts that BF16 logits would tie: 1 + 2^-10 against 1."""
    x, weight = torch.tensor([[1.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.0], [1.0, 2.0**-10]])
    (logits,) = call("router", x, weight)
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 1.0 + 2.0**-10]]


def test_topk_orders_by_logit_where_sigmoid_saturates() -> None:
    """sigmoid is exactly 1.0 in FP32 for all of these; the logits still decide."""
    logits = torch.tensor([[20.0, 40.0, 30.0, 19.0, 25.0, 18.0]])
    assert (logits.sigmoid() == 1.0).all()
    ids, weights = call("topk", logits, SLOT, k=3)
    assert ids.dtype == torch.int32 and ids.tolist() == [[1, 2, 4]]
    assert torch.equal(weights, torch.full((1, 3), 1.0) / 3)


def test_topk_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros(1, 256)
    logits[0, [7, 200]] = 1.0
    assert call("topk", logits, SLOT, k=6)[0].tolist() == [[7, 200, 0, 1, 2, 3]]


def test_topk_when_all_scores_are_near_zero() -> None:
    """The weights are w / (sum + 1e-20): still a distribution at -30, and finite where sigmoid underflows."""
    (_, weights) = call("topk", torch.full((1, 256), -30.0), SLOT, k=6)
    torch.testing.assert_close(weights, torch.full((1, 6), 1 / 6), atol=0, rtol=1e-6)
    for logit in (-100.0, -1000.0):
        (_, weights) = call("topk", torch.full((1, 256), logit), SLOT, k=6)
        assert weights.isfinite().all() and (weights >= 0).all() and (weights < 1e-20).all()


def test_topk_softmax_and_no_renormalisation() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    ids, weights = call("topk", logits, SLOT, k=2, score="softmax", renormalize=False)
    z = sum(math.exp(v) for v in (1, 3, 2, 0))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[math.exp(3) / z, math.exp(2) / z]]))
    _, weights = call("topk", logits, SLOT, k=2, score="softmax")
    torch.testing.assert_close(weights, torch.tensor([[1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]]))


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_topk_of_a_padded_row_chooses_none(score: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [torch.nan, 1.0, 2.0], [3.0, 2.0, 1.0]])
    ids, weights = call("topk", logits, torch.tensor([4, -1, 0]).int(), k=2, score=score)
    assert ids.tolist() == [[1, 2], [-1, -1], [0, 1]]
    assert weights[1].tolist() == [0.0, 0.0] and (weights[::2] > 0).all()


def test_expert_linear_of_no_expert_is_zero_and_reads_no_weight() -> None:
    weight, ids = bf16(3, 8, 16), torch.tensor([[0, -1], [-1, -1]]).int()
    weight[1:] = torch.nan  # the last one is what -1 would pick
    for x in (bf16(2, 16, seed=1), bf16(2, 2, 16, seed=2)):
        (y,) = call("expert_linear", x, ids, weight)
        assert_rounded_from(y[0, 0], weight[0].double() @ (x[0] if x.ndim == 2 else x[0, 0]).double())
        assert (y[0, 1] == 0).all() and (y[1] == 0).all()


def test_expert_linear_shared_and_per_rank_inputs() -> None:
    weight, ids = bf16(5, 8, 16), torch.tensor([[4, 0], [0, 2]]).int()
    shared, own = bf16(2, 16, seed=1), bf16(2, 2, 16, seed=2)
    for x in (shared, own):
        (y,) = call("expert_linear", x, ids, weight)
        for row in range(2):
            for rank in range(2):
                source = x[row] if x.ndim == 2 else x[row, rank]
                assert_rounded_from(y[row, rank], weight[ids[row, rank]].double() @ source.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_gate_first(dtype: torch.dtype) -> None:
    x = bf16(3, 4, 16).to(dtype) * 3
    gate, up = x[..., :8].double(), x[..., 8:].double()
    assert_rounded_from(call("silu_mul", x)[0], gate / (1 + torch.exp(-gate)) * up)


def test_combine_sums_in_rank_order() -> None:
    """FP32 addition in rank order: (2^25 + 1) - 2^25 is 0, while (2^25 - 2^25) + 1 is 1."""
    y = torch.tensor([[[2.0**25], [1.0], [-(2.0**25)]], [[2.0**25], [-(2.0**25)], [1.0]]]).bfloat16()
    assert call("combine", y, torch.ones(2, 3))[0].flatten().tolist() == [0.0, 1.0]


def test_sum_rounds() -> None:
    a, b = bf16(4, 8), bf16(4, 8, seed=1)
    assert_rounded_from(call("sum", a, b)[0], a.double() + b.double())


def test_fp32_numerics_round_nowhere() -> None:
    x, weight = torch.full((1, 2), 1.0 + 2.0**-20), torch.ones(2, 2)
    for kind, inputs, attrs in (
        ("add", (x, x), {}),
        ("norm", (x, weight[0]), {"eps": 0.0}),
        ("linear", (x, weight), {}),
        ("silu_mul", (x,), {}),
        ("sum", (x, x), {}),
        ("combine", (x[:, None], torch.ones(1, 1)), {}),
        ("embed", (torch.zeros(1).int(), x), {}),
    ):
        made = call(kind, *inputs, numerics="fp32", **attrs)
        assert all(value.dtype == torch.float32 for value in made), kind
    assert call("sum", x, x, numerics="fp32")[0][0, 0].item() == 2 + 2.0**-19
