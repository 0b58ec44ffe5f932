"""``flintc bench bundles``: what it prints of given figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from said import Flintc

from flintc.bench import turns
from flintc.bench.turns import Side, Turns

SIDES = (Side("a", 490, (0.98, 0.97, 1.0), True, 0.0, {"topk": 1.2}), Side("b", 443, (0.95,) * 3, False, 2e-5, {}))


def test_tables(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def measured(*args: Any) -> Turns:
        asked.append(args)
        return Turns("flint", "nvfp4", 4096, 8, "a GPU", 4.5e12, SIDES)

    monkeypatch.setattr("flintc.cli.common.stdout.width", 200)
    monkeypatch.setattr(turns, "measure_turns", measured)
    said = flintc("bench", "bundles", "a", "b", "--context", "4096", "--batch", "8", "--kernel", "topk")
    assert (said.code, said.err) == (0, "")
    assert asked == [([Path("a"), Path("b")], 4096, 8, 40, 3, ["topk"])]
    assert "a 490 0.980 +0 0.980 0.970 1.000 equal" in said.rows
    assert "b 443 0.950 -30 0.950 0.950 0.950 KL 2.0e-05" in said.rows
    assert "topk 1.20 -" in said.rows
    assert "read ceiling 4.50 TB/s on a GPU" in " ".join(said.out.split())
