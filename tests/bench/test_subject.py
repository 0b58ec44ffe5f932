"""Where a checkpoint under verification lies and what runs it, on machines whose GPU is of no use here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flintc.bench.built import gpu_here
from flintc.bench.subject import check_backend, default_backend, open_subject
from flintc.errors import BackendError, UsageError

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"


@pytest.fixture
def older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU that torch can use and nothing is compiled for."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Some GPU")


@pytest.mark.usefixtures("older_gpu")
def test_a_gpu_that_nothing_is_compiled_for_is_left_alone() -> None:
    assert (default_backend(), default_backend("interpret")) == ("reference", "interpret")
    with pytest.raises(BackendError, match=r"Some GPU here is sm_80 \(choose backend reference or interpret\)"):
        check_backend("cuda")
    assert open_subject(EXAMPLE / "tiny-flint.gguf").device == "cpu"


def test_a_gpu_without_the_package_that_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the default all the same: nobody wants the CPU in its place without being told."""
    monkeypatch.setattr("flintc.api.gpu_target", lambda: "sm_90")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert default_backend() == default_backend("interpret") == "cuda"
    for need in (lambda: check_backend("cuda"), gpu_here):
        with pytest.raises(BackendError, match=r"cuda-bindings \(pip install 'flintc\[cuda\]'\)"):
            need()


def test_backends_by_name() -> None:
    for name in ("reference", "interpret"):
        check_backend(name)
    with pytest.raises(UsageError, match=r"unknown backend 'fortran' \(choose from reference, interpret, cuda\)"):
        check_backend("fortran")
