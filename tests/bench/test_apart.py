"""Calls in processes of their own: what comes back, and what does not."""

from __future__ import annotations

import json
import math
import os
import time

import pytest
import torch

from flintc.bench.apart import failure_text, run_apart
from flintc.errors import BackendError, MeasurementError, Place, SpecError


def test_a_result_comes_back_from_another_process() -> None:
    assert run_apart(math.sqrt, 9.0) == 3.0
    assert run_apart(os.getpid) != os.getpid()


def test_a_tensor_comes_back_whole() -> None:
    """Although the process that made it has ended."""
    assert torch.equal(run_apart(torch.arange, 100_000), torch.arange(100_000))


def test_a_failure_is_one_line_with_its_traceback_beside() -> None:
    with pytest.raises(MeasurementError) as caught:
        run_apart(json.loads, "{")
    assert str(caught.value).startswith("JSONDecodeError: Expecting property name")
    assert "Traceback" in caught.value.__notes__[0] and "json" in caught.value.__notes__[0]


def refuse(message: str) -> None:
    raise BackendError(message, remedy="do otherwise")


def misspell() -> None:
    raise SpecError("no such key", Place("a.yaml", 1, 2))


def test_an_error_of_ours_is_told_in_full() -> None:
    with pytest.raises(BackendError) as caught:
        run_apart(refuse, "no room")
    assert str(caught.value) == "no room (do otherwise)"
    assert "in refuse" in caught.value.__notes__[0]


def test_an_error_of_ours_that_cannot_travel_is_told_in_words() -> None:
    with pytest.raises(MeasurementError) as caught:
        run_apart(misspell)
    assert str(caught.value) == "SpecError: a.yaml:1:2: no such key"


def test_a_process_that_dies() -> None:
    with pytest.raises(MeasurementError, match="ended without a result, exit code 3"):
        run_apart(os._exit, 3)


def test_a_process_that_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(MeasurementError, match=r"not done after 0\.5 s"):
        run_apart(time.sleep, 60, limit=0.5)
    assert time.monotonic() - started < 30


def test_what_it_prints_is_no_part_of_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    run_apart(os.system, "echo said by a library")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "said by a library\n")


def test_a_failures_line_is_short() -> None:
    assert failure_text(ValueError("\n\n  first \nsecond")) == "ValueError: first"
    assert failure_text(KeyError()) == "KeyError"
    assert len(failure_text(ValueError("x" * 1000))) == 200
