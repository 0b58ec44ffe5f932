"""Running graphs: partitions do not matter, caches are written in place, traces see every value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flintc.ir.build import build
from flintc.ir.graph import Graph, Launch, Op
from flintc.ir.lower import lower_attention
from flintc.ir.types import resolve
from flintc.reference import rope_table, run, run_launch
from flintc.spec import bind_defaults, load_spec

SYMBOLS = {"B": 3, "Q": 2, "T": 8, "P": 16, "C": 64}
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return build(bind_defaults(load_spec("tiny-flint")))


def make_inputs(graph: Graph) -> dict[str, Tensor]:
    """Random weights and caches; rows at positions 20 and 5 of two sequences, and a padded one."""
    generator = torch.Generator().manual_seed(0)
    made = {v for op in graph.ops.values() for v in op.outputs}
    inputs = {}
    for value in graph.values.values():
        if value.name in made:
            continue
        shape = [resolve(d, SYMBOLS) for d in value.type.shape]
        noise = torch.randn(shape, generator=generator)
        inputs[value.name] = (noise / shape[-1] ** 0.5).to(DTYPES[value.type.dtype])
        if value.name.startswith("block_table"):
            inputs[value.name] = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    inputs["ids"] = torch.tensor([5, 300, 0]).int()
    inputs["positions"] = torch.tensor([20, 5, 0]).int()
    inputs["seqs"] = torch.tensor([1, 0, -1]).int()
    inputs["rope_table"] = rope_table(64, 32, 10000.0)
    return inputs


def fuse_all(graph: Graph) -> Graph:
    """The extreme partition: one launch."""
    return graph.with_launches((Launch("all", "all", tuple(graph.ops)),))


def test_partition_does_not_matter(graph: Graph) -> None:
    unfused, fused = (run(g, make_inputs(graph)) for g in (graph, fuse_all(graph)))
    assert unfused.keys() == fused.keys() == set(graph.outputs)
    assert all(torch.equal(unfused[name], fused[name]) for name in unfused)


@pytest.mark.parametrize(("chunk", "partials"), [(4, 66), (4, 4), (4, 1), (16, 66), (64, 3)])
def test_lowering_does_not_matter_in_fp32(graph: Graph, chunk: int, partials: int) -> None:
    """Nor how many partials a row may have: position 20 has six chunks of 4."""
    inputs = {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in make_inputs(graph).items()}
    whole = run(graph, {k: v.clone() for k, v in inputs.items()}, "fp32")["logits"]
    lowered = run(lower_attention(graph, chunk, partials=partials), inputs, "fp32")["logits"]
    torch.testing.assert_close(lowered[:2], whole[:2], atol=1e-5, rtol=1e-5)


def test_values_have_the_types_the_graph_gives_them(graph: Graph) -> None:
    lowered = lower_attention(graph, 16)
    seen: dict[str, Tensor] = {}
    run(lowered, make_inputs(graph), trace=lambda op, made: seen.update(made))
    assert seen.keys() == {v for op in lowered.ops.values() for v in op.outputs}
    for name, tensor in seen.items():
        type = lowered.values[name].type
        assert tensor.dtype == DTYPES[type.dtype], name
        assert list(tensor.shape) == [resolve(d, SYMBOLS) for d in type.shape], name


def test_fp32_numerics_make_fp32_values(graph: Graph) -> None:
    seen: dict[str, Tensor] = {}
    run(graph, make_inputs(graph), "fp32", trace=lambda op, made: seen.update(made))
    kinds = {graph.values[name].kind: tensor.dtype for name, tensor in seen.items() if tensor.dtype != torch.int32}
    assert kinds == {"cache": torch.bfloat16, "activation": torch.float32}  # the given caches are BF16


def test_caches_are_written_in_place(graph: Graph) -> None:
    inputs = make_inputs(graph)
    before = {k: v.clone() for k, v in inputs.items()}
    made = run(graph, inputs)
    caches = [v.name for v in graph.values.values() if v.kind == "cache" and v.name in inputs]
    assert len(caches) == 6
    for name in caches:
        assert made[f"{name}.1"] is inputs[name]
        changed = (inputs[name] != before[name]).flatten(1).any(1)
        assert changed.sum() == 2  # one page of each live row
    for name in inputs.keys() - set(caches):
        assert torch.equal(inputs[name], before[name]), name


def test_a_launch_run_alone_makes_the_same_values(graph: Graph) -> None:
    lowered = lower_attention(graph, 16)
    seen: dict[str, Tensor] = dict(make_inputs(graph))
    run(lowered, seen, trace=lambda op, made: seen.update({k: v.clone() for k, v in made.items()}))
    inputs = make_inputs(graph) | {k: v for k, v in seen.items() if k in lowered.producers}
    for launch in lowered.launches:
        if lowered.ops[launch.ops[0]].kind == "kv_write":
            continue
        for name, value in run_launch(lowered, launch, inputs).items():
            assert torch.equal(value.nan_to_num(), seen[name].nan_to_num()), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("lowered", [False, True])
def test_cuda_computes_the_same(graph: Graph, lowered: bool) -> None:
    chosen = lower_attention(graph, 16) if lowered else graph
    inputs = {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in make_inputs(graph).items()}
    on_gpu = {k: v.cuda() for k, v in inputs.items()}
    cpu, gpu = (run(chosen, given, "fp32")["logits"] for given in (inputs, on_gpu))
    assert gpu.is_cuda
    torch.testing.assert_close(gpu.cpu()[:2], cpu[:2], atol=1e-4, rtol=1e-4)


def test_outputs_alone_are_returned(graph: Graph) -> None:
    assert run(graph, make_inputs(graph)).keys() == set(graph.outputs)


def test_a_missing_input_is_named(graph: Graph) -> None:
    inputs = make_inputs(graph)
    del inputs["L3.w.qkv"]
    with pytest.raises(KeyError, match=r"op L3\.qkv reads L3\.w\.qkv"):
        run(graph, inputs)


def test_a_graph_made_by_hand() -> None:
    """One op, numbers that can be checked in the head."""
    ops = {"s": Op("s", "sum", ("a", "b"), ("y",))}
    graph = build(bind_defaults(load_spec("tiny-flint")))
    value = graph.values["L0.h"]
    values = {n: replace(value, name=n) for n in ("a", "b", "y")}
    graph = Graph("hand", values, ops, (Launch("s", "sum", ("s",)),), ("y",))
    made = run(graph, {"a": torch.tensor([[1.0]]).bfloat16(), "b": torch.tensor([[2.0**-9]]).bfloat16()})
    assert made["y"].dtype == torch.bfloat16 and made["y"].item() == 1.0
