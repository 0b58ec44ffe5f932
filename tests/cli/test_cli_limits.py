"""``flintc bench limits``: what it prints of given figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from said import Flintc

from flintc.bench import limits
from flintc.bench.limits import Limits

FOUND = Limits("flint", "nvfp4", 1000, "a GPU", 4e12, {1: 4.25, 1000: 9.5}, 29.8, 28.5, {528: (200_000_000, 50.0)})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def measured(*args: Any) -> Limits:
        calls.append(args)
        return FOUND

    monkeypatch.setattr(limits, "measure_limits", measured)
    return calls


def test_tables(flintc: Flintc, asked: list[tuple[Any, ...]]) -> None:
    said = flintc("bench", "limits", "flint", "--weights", "nvfp4", "--context", "1000", "--bundle", "here")
    assert (said.code, said.err) == (0, "")
    assert asked == [("flint", "nvfp4", Path("here"), 1000)]
    words = " ".join(said.out.split())
    for part in ("1,000", "9.50", "200.0", "50.00", "100%", "29.80 us", "28.50", "4.00 TB/s on a GPU"):
        assert part in words


@pytest.mark.usefixtures("asked")
def test_json(flintc: Flintc) -> None:
    data = json.loads(flintc("bench", "limits", "flint", "--json").out)
    assert data["attention_us_by_tokens"] == {"1": 4.25, "1000": 9.5}
    assert data["reads_by_programs"] == {"528": {"bytes": 200_000_000, "us": 50.0}}
