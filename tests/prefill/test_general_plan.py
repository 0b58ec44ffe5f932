"""What the general path of a graph is made of, and how a plan's JSON holds it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from golden import check_golden
from graphs import OTHER, Sketch, baseline, pipeline

from flintc.codegen.general import general, with_general
from flintc.codegen.planner import plan
from flintc.errors import BundleError
from flintc.ir.plan import Plan
from flintc.ir.serialize import plan_from_json, plan_to_json
from flintc.passes import PASSES
from flintc.runtime.prefill.memory import chunk_bytes, router_bytes

LAST = list(PASSES)[-1]


def planned(spec="tiny-flint", weights="bf16"):
    graph = baseline(spec, weights)
    return Plan(graph, {}, (), {}, {}, {}, general=general(graph))


@pytest.mark.parametrize(
    ("spec", "weights"), [("flint", "bf16"), ("flint", "nvfp4"), ("tiny-flint", "nvfp4"), (OTHER, "bf16")]
)
def test_every_op_is_served_once_and_after_what_it_reads(spec, weights):
    graph = baseline(spec, weights)
    made = general(graph)
    served = [op for routine in made.routines for op in routine.ops]
    assert sorted(served) == sorted(graph.ops)
    done = set()
    for routine in made.routines:
        done |= set(routine.ops)
        for value in (v for op in routine.ops for v in graph.ops[op].inputs):
            assert graph.producers.get(value, routine.ops[0]) in done, routine
        assert set(routine.kernels.values()) <= set(made.kernels)


def test_fusion_changes_nothing():
    """The path follows from the ops, and no pass touches those."""
    assert all(general(step.graph) == general(baseline("tiny-flint")) for step in pipeline("tiny-flint").steps)


def test_a_layer_of_flint_in_routines():
    made = general(baseline("flint", "nvfp4"))
    layer = [f"{r.kind}: {' '.join(op.rpartition('.')[2] for op in r.ops)}" for r in made.routines if "L3." in r.name]
    assert layer == [
        "linear: qkv",
        "heads: q_norm k_norm rope kv_write",
        "attention: attention attention_merge",
        "linear: o_proj",
        "norm: mlp_add mlp_norm",
        "experts: router topk expert_gate_up expert_silu expert_down",
        "linear: shared_gate_up",
        "silu: shared_silu",
        "linear: shared_down",
        "norm: combine shared_add add norm",
    ]


def test_no_general_path_for_ops_in_another_order():
    sketch = Sketch()
    x, r = (sketch.given(n, "bf16", "B", 32) for n in "xr")
    sketch.op("add", "add", (x, r), "s t")
    assert general(sketch.graph("s")) is None
    graph = baseline("tiny-flint")
    assert general(replace(graph, head=frozenset())) is None, "a head of one product"
    bare = plan(graph)
    assert with_general(bare).general is not None and replace(bare, general=None) == bare


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_golden_entries(weights):
    """Headers and entries of tiny-flint's kernels, as in tests/codegen/test_golden_sources.py."""
    kernels = sorted(general(baseline("tiny-flint", weights)).kernels.values(), key=lambda k: k.name)
    check_golden(f"kernels/tiny-flint.general.{weights}.txt", "\n\n".join(_entry(k) for k in kernels))


def _entry(kernel):
    header, _, rest = kernel.source.partition("\n\nimport triton")
    return header + "\n" + rest[rest.rindex("@triton.jit") :]


@pytest.mark.parametrize(("spec", "weights"), [("flint", "bf16"), ("flint", "nvfp4"), (OTHER, "bf16")])
def test_generated_source_is_fit_to_read(spec, weights):
    for kernel in general(baseline(spec, weights)).kernels.values():
        text = kernel.source
        assert max(map(len, text.splitlines())) <= 120, kernel.name
        assert not re.search(r"[ \t]\n|\n{4,}", text), f"{kernel.name}: stray blanks"
        assert "{{" not in text and "{%" not in text and text.endswith("\n"), kernel.name
        assert not kernel.waits and "wait_for_producers" not in text


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_json_and_back(weights):
    made = planned(weights=weights)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(made)))) == made


def _drop_a_routine(general):
    general["routines"].pop()


def _serve_an_op_twice(general):
    general["routines"][1]["ops"] += general["routines"][0]["ops"]


def _name_no_kernel(general):
    general["routines"][1]["kernels"]["run"] = "nothing"


def _wait(general):
    general["kernels"][0]["waits"] = True


def _another_kind(general):
    general["routines"][0]["kind"] = "magic"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_a_routine, "do not serve every op exactly once"),
        (_serve_an_op_twice, "do not serve every op exactly once"),
        (_name_no_kernel, "nothing"),
        (_wait, "does not wait"),
        (_another_kind, "magic"),
    ],
)
def test_damaged_json_is_refused(damage, message):
    data = plan_to_json(planned())
    data = json.loads(json.dumps(data))
    damage(data["general"])
    with pytest.raises(BundleError, match=message):
        plan_from_json(data)


@pytest.mark.parametrize(("rows", "context"), [(64, 64), (64, 512), (512, 512)])
def test_memory_of_a_chunk_covers_its_largest_routine(rows, context):
    """The experts of tiny-flint hold their rows, results and weights; a full layer's heads the whole context's keys.

    Those are gathered from their pages first.
    """
    graph = baseline("tiny-flint")
    need = chunk_bytes(graph, general(graph), rows, context)
    results = rows * 3 * (128 * 2 + 64 * 2 + 128 * 4 + 4 + 4)
    keys = 2 * 2 * 2 * 32 * context
    assert need >= max(results, 2 * keys)
    assert need <= 3 * (results + 2 * keys + rows * 8 * (512 + 128))


def test_memory_of_routers_is_three_parts_of_each():
    graph = baseline("flint")
    assert router_bytes(graph, general(graph)) == 47 * 256 * 2048 * 3 * 2
