"""``flintc bench compare``: what it prints of given figures, and what it says where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from said import Flintc

from flintc.bench import compare
from flintc.bench.compare import COMPILED, EAGER, FUSED, UNFUSED, Comparison, Row
from flintc.bench.timing import StepFigures
from flintc.cli import bench

FOUND = Comparison(
    "flint", 100_000, "Some GPU", 4e12, {"torch": "2.11.0", "transformers": "5.24.0", "triton": "3.7.1"},
    (
        Row(EAGER, StepFigures(128.6, 4253, None, "attention eager, experts batched_mm")),
        Row(COMPILED, None, "not done after 300 s [/]"),
        Row(UNFUSED, StepFigures(4.1, 1052, 7_380_000_000, "Triton 3.7.1")),
        Row(FUSED, StepFigures(2.5, 441, 7_000_000_000, "Triton 3.7.1")),
    ),
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Has every comparison find the figures above; what was asked for."""
    calls: list[tuple[Any, ...]] = []

    def measured(*args: Any) -> Comparison:
        calls.append(args[:6])
        return FOUND

    monkeypatch.setattr(compare, "measure_comparison", measured)
    return calls


def cells(text: str, name: str) -> list[str]:
    """Cells after the name, in the table's line of a row."""
    line = next(line for line in text.splitlines() if name in line and "\N{BOX DRAWINGS LIGHT VERTICAL}" in line)
    return [cell.strip() for cell in line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[2:-1]]


@pytest.mark.usefixtures("asked")
def test_the_table_holds_every_figure(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "stdout", Console(width=100))
    said = flintc("bench", "compare")
    assert (said.code, said.err) == (0, "")
    assert cells(said.out, EAGER) == ["128.600", "4,253", "-", "-", "51.44"]
    assert cells(said.out, COMPILED) == ["-"] * 5
    assert cells(said.out, UNFUSED) == ["4.100", "1,052", "1,800", "45%", "1.64"]
    assert cells(said.out, FUSED) == ["2.500", "441", "2,800", "70%", "1.00"]
    words = " ".join(said.out.split())
    assert f"{COMPILED}: not measured: not done after 300 s [/]" in words
    assert f"{EAGER}: attention eager, experts batched_mm" in words
    assert "flint, bf16, 100,000 tokens in the cache, batch 1, all layers and the final norm" in words
    assert "read ceiling 4.00 TB/s on Some GPU; torch 2.11.0, transformers 5.24.0, triton 3.7.1." in words


@pytest.mark.usefixtures("asked")
def test_json_is_the_comparison(flintc: Flintc) -> None:
    said = flintc("bench", "compare", "--json")
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out) == FOUND.to_json()


def test_what_is_asked_for(flintc: Flintc, asked: list[tuple[Any, ...]]) -> None:
    flintc("bench", "compare")
    flintc("bench", "compare", "x.yaml", "--bundle", "a", "--baseline-bundle", "b", "--context", "9", "--repeats", "2",
           "--compile-limit", "60")  # fmt: skip
    flintc("bench", "compare", "--no-compile")
    assert asked == [
        ("flint", None, None, 100_000, 5, 300.0),
        ("x.yaml", Path("a"), Path("b"), 9, 2, 60.0),
        ("flint", None, None, 100_000, 5, None),
    ]


def test_without_a_gpu(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    said = flintc("bench", "compare", "tiny-flint", "--json")
    assert (said.code, said.out) == (2, "")
    assert said.err == "flintc: error: comparing needs a GPU of a target that kernels are compiled for\n"
