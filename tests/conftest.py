"""One cache for a whole run of the tests, and what the marks mean.

Tests marked ``gpu`` run wherever there is an NVIDIA GPU, and are skipped, visibly, only where there is none.

Presence is read from the system, not from torch: a torch that cannot use the GPU that is there must fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of our own, shared by all processes of a run: the user's is neither read nor filled, unless named."""
    if named := os.environ.get("FLINTC_CACHE"):
        yield Path(named)
        return
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "flintc-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLINTC_CACHE", str(folder))
        yield folder
