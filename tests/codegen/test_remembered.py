"""Types that Triton's interpreter makes once are those that it would make each time."""

from __future__ import annotations

from contextlib import nullcontext

import launches
import pytest
import torch
import triton.language as tl
from gemv_graphs import linear
from triton.runtime import interpreter

from flintc.codegen.remembered import remembered_types


def described() -> list[object]:
    """What is known of a few types and of values of them."""
    types = [tl.block_type(tl.bfloat16, [4, 8]), tl.block_type(tl.pointer_type(tl.int8), [16]), tl.int32]
    values = [tl.tensor(None, type) for type in types]
    return [(str(v.type), str(v.dtype), str(v.shape), v.numel.value, str(v.shape.type)) for v in values]


def test_they_are_those_of_triton_the_first_time_and_again() -> None:
    own = described()
    with remembered_types():
        assert [described(), described()] == [own] * 2
    assert described() == own


def test_a_shape_that_triton_refuses_is_refused_each_time() -> None:
    with remembered_types():
        for _ in range(2):
            with pytest.raises(ValueError, match="power of 2"):
                tl.block_type(tl.float32, [3])


def test_pointers_of_several_kinds_are_not_taken_for_each_other() -> None:
    with remembered_types():
        one, other = (tl.block_type(tl.pointer_type(tl.int8, const=const), [4]) for const in (False, True))
    assert (one.element_ty.const, other.element_ty.const) == (False, True)


def test_triton_has_its_own_back_after_an_error() -> None:
    def patched() -> tuple[object, ...]:
        return tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype

    own = patched()
    with pytest.raises(ZeroDivisionError), remembered_types():
        assert all(a is not b for a, b in zip(patched(), own, strict=True))
        raise ZeroDivisionError
    assert patched() == own


def test_a_kernel_makes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = linear(48, 64)
    given = {"x": torch.randn(3, 64).bfloat16(), "w": torch.randn(48, 64).bfloat16()}
    (remembered,) = launches.interpret(graph, given, B=3).values()
    monkeypatch.setattr("flintc.codegen.interpret.remembered_types", nullcontext)
    (own,) = launches.interpret(graph, given, B=3).values()
    assert torch.equal(own, remembered) and own.any()
