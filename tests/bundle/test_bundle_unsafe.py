"""A bundle whose plan is not proved safe is refused when it is read, however well its hashes match."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bundles import ORIGIN, make_compiled, make_plan

from flintc.bundle import build_bundle, load_bundle, write_bundle
from flintc.errors import BundleError
from flintc.ir.plan import Plan


def written(plan: Plan, out: Path) -> Path:
    write_bundle(build_bundle(plan, make_compiled(plan), ORIGIN), out)
    return out


def test_a_store_above_the_wait(tmp_path: Path) -> None:
    plan = make_plan()
    (path,) = plan.kernels["add"].paths
    wait, *reads, write_s, write_y = path
    kernel = replace(plan.kernels["add"], paths=((write_s, wait, *reads, write_y),))
    unsafe = replace(plan, kernels={"add": kernel})
    with pytest.raises(BundleError, match=r"launch add: it stores to s in b0 above its wait") as error:
        load_bundle(written(unsafe, tmp_path / "unsafe"))
    assert "plan.json" in error.value.message and error.value.remedy is None
    assert load_bundle(written(plan, tmp_path / "safe")).plan == plan


def test_a_graph_that_makes_no_sense(tmp_path: Path) -> None:
    plan = make_plan()
    add = plan.graph.ops["add"]
    graph = replace(plan.graph, ops={"add": replace(add, inputs=("x",))})
    with pytest.raises(BundleError, match="does not describe a plan that can run: graph tiny"):
        load_bundle(written(replace(plan, graph=graph), tmp_path / "senseless"))
