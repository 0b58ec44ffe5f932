"""``flintc bench timeline``: what it prints of given figures."""

from __future__ import annotations

from typing import Any

import pytest
from said import Flintc

from flintc.bench import timeline
from flintc.bench.timeline import Hop, Timeline

HOPS = (Hop("L0.topk", "topk", 1, 1.0, 3.0, 0.5, 0.625, 0.25, 0.375, 0.0, 1),)


def test_table(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def measured(*args: Any) -> Timeline:
        asked.append(args)
        return Timeline("flint", "nvfp4", 4096, 8, "a GPU", 0.97, 1.01, HOPS * 3)

    monkeypatch.setattr("flintc.cli.common.stdout.width", 200)
    monkeypatch.setattr(timeline, "measure_timeline", measured)
    said = flintc("bench", "timeline", "flint", "--weights", "nvfp4", "--context", "4096", "--batch", "8")
    assert (said.code, said.err) == (0, "")
    assert asked == [("flint", "nvfp4", None, 4096, 8, 9, None)]
    assert "topk 3 3 1.00 3.00 0.50 0.62 0.25 0.38 0.00 1 1" in said.rows
    assert "0.970 ms a step, 1.010 with stamps" in " ".join(said.out.split())
