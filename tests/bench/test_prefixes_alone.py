"""Prefixes are measured in processes of their own; what they measure needs a GPU (tests/gpu/test_gpu_bench.py)."""

from __future__ import annotations

import os
import pickle
from functools import partial

import pytest

from flintc import api
from flintc.bench.prefixes import alone
from flintc.bundle import Bundle
from flintc.errors import BackendError, FlintcError


def refuse(message: str) -> None:
    raise BackendError(message, remedy="do otherwise")


def test_another_process_runs_it() -> None:
    assert alone(os.getpid) != os.getpid()


def test_its_error_is_told_in_full() -> None:
    with pytest.raises(FlintcError) as error:
        alone(partial(refuse, "no room"))
    assert str(error.value) == "no room (do otherwise)"
    assert isinstance(error.value, BackendError)


def test_a_bundle_can_be_handed_over() -> None:
    bundle = api.compile("tiny-flint", target="sm_90")
    assert isinstance(bundle, Bundle)
    assert pickle.loads(pickle.dumps(bundle)).files() == bundle.files()
