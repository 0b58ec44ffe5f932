"""A chain's time by subtraction, where a graph takes as long as told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flintc.bench import timing
from flintc.bench.timing import us_in_chain
from flintc.errors import BackendError


def graphs(monkeypatch: pytest.MonkeyPatch, ms: Callable[[int], float]) -> tuple[Callable[[int], Any], list[int]]:
    """``capture`` of graphs that take ``ms`` of how often they repeat the chain, and how often each did."""
    made: list[int] = []

    def capture(times: int) -> Any:
        made.append(times)
        return SimpleNamespace(replay=times)

    monkeypatch.setattr(timing, "median_ms", lambda replay, repeats: ms(replay))
    return capture, made


@pytest.mark.parametrize(("unit", "times"), [(0.5, 1), (0.04, 5), (0.0001, 64)])
def test_the_start_of_a_graph_is_left_out(monkeypatch: pytest.MonkeyPatch, unit: float, times: int) -> None:
    capture, made = graphs(monkeypatch, lambda n: 0.003 + n * unit)
    assert us_in_chain(capture, 20) == pytest.approx(unit * 1e3)
    assert made == [1, times, 2 * times]


def test_what_is_lost_in_noise_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    capture, _ = graphs(monkeypatch, lambda n: 0.1)
    with pytest.raises(BackendError, match="other work keeps this GPU busy"):
        us_in_chain(capture, 20)
