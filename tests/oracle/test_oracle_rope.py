"""The RoPE table against the angles that transformers computes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import FlintConfig
from transformers.models.flint.modeling_flint import FlintRotaryEmbedding

from flintc.reference import rope_table


@pytest.mark.parametrize("theta", [100.0, 10000.0, 500000.0, 8e6])
@pytest.mark.parametrize("head_dim", [16, 96, 128])
def test_table_equals_transformers(theta: float, head_dim: int) -> None:
    config = FlintConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    positions = 20000
    cos, sin = FlintRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    table = rope_table(positions, head_dim, theta)
    assert table.shape == (positions, 2, head_dim // 2) and table.dtype == torch.float32
    for plane, expected in ((0, cos[0]), (1, sin[0])):
        assert torch.equal(table[:, plane], expected[:, : head_dim // 2])
        assert torch.equal(table[:, plane], expected[:, head_dim // 2 :])


def test_table_reaches_the_end_of_the_context() -> None:
    config = FlintConfig()
    last = config.max_position_embeddings - 1
    cos, sin = FlintRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[last]]))
    table = rope_table(last + 1, config.head_dim, 10000.0)
    assert torch.equal(table[last, 0], cos[0, 0, :64]) and torch.equal(table[last, 1], sin[0, 0, :64])
