"""Tests marked ``gpu`` run wherever there is an NVIDIA GPU, and are skipped, visibly, only where there is none.

Presence is read from the system, not from torch: a torch that cannot use the GPU that is there must fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU, usable or not."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no GPU."""
    if gpu_present():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
