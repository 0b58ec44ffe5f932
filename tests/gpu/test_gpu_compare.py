"""``flintc bench compare`` on the device, at test size: every row is measured, and counts what ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from flintc import api
from flintc.bench.apart import run_apart
from flintc.bench.compare import EAGER, FUSED, UNFUSED, measure_comparison
from flintc.bench.transformers_step import measure_transformers
from flintc.bundle import load_bundle
from flintc.checkpoint.config_json import published_config
from flintc.passes import PASSES
from flintc.spec import bind_defaults, load_spec

pytestmark = pytest.mark.gpu

CONTEXT = 400


def test_rows_of_one_run(tmp_path: Path) -> None:
    target = api.gpu_target()
    assert target is not None
    fused, unfused = tmp_path / "fused", tmp_path / "unfused"
    api.compile("tiny-flint", target=target, out=fused)
    api.compile("tiny-flint", target=target, disable_passes=list(PASSES), out=unfused)
    found = measure_comparison("tiny-flint", fused, unfused, CONTEXT, 5, None)
    assert [row.name for row in found.rows] == [EAGER, UNFUSED, FUSED]
    launches = {}
    for row in found.rows:
        assert row.figures is not None
        assert 0 < row.figures.ms < 1000
        launches[row.name] = row.figures.launches
    for name, folder in ((UNFUSED, unfused), (FUSED, fused)):
        assert launches[name] == len(load_bundle(folder).plan.graph.body)
    assert launches[EAGER] > launches[UNFUSED] > launches[FUSED]
    for row in found.rows[1:]:
        share, ratio = found.share(row), found.ratio(row)
        assert share is not None and 0 < share < 1
        assert ratio is not None and ratio >= 1


def test_the_step_of_transformers_compiles() -> None:
    """`flintc bench compare` would report a failure as text; at this size there is no reason for one."""
    published = dict(published_config(bind_defaults(load_spec("tiny-flint"))))
    eager, compiled = (
        run_apart(measure_transformers, published, CONTEXT, 5, compiled, limit=400.0) for compiled in (False, True)
    )
    assert 0 < compiled.launches < eager.launches
    assert 0 < compiled.ms < 1000
