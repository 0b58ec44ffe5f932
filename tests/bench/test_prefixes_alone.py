"""Prefixes are measured in processes of their own; what they measure needs a GPU (tests/gpu/test_gpu_bench.py)."""

from __future__ import annotations

import pickle

from flintc import api


def test_a_bundle_can_be_handed_over() -> None:
    bundle = api.compile("tiny-flint", target="sm_90")
    assert pickle.loads(pickle.dumps(bundle)).files() == bundle.files()
