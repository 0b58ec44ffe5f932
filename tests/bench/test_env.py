"""Facts about the machine, with a made-up driver where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flintc.bench import env


class FakeDriver:
    """Two devices that answer as the CUDA driver does: through pointers, with a status."""

    names = (b"NVIDIA H200", b"NVIDIA B200")
    capabilities = ((9, 0), (10, 0))

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13010
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, out: Any, size: int, device: ctypes.c_int) -> int:
        out.value = self.names[device.value]
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: ctypes.c_int) -> int:
        out._obj.value = 140 << 30
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: ctypes.c_int) -> int:
        major, minor = self.capabilities[device.value]
        out._obj.value = {16: 132, 75: major, 76: minor}[attribute]
        return 0


def test_facts_are_json_and_cost_no_heavy_import() -> None:
    program = (
        "import json, sys; from flintc.bench.env import facts; "
        "print(json.dumps([facts(), sorted({'torch', 'triton'} & set(sys.modules))]))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    found, heavy = json.loads(out)
    assert heavy == []
    assert found["python"] == platform.python_version()
    assert found["triton"][0].isdigit()
    assert found["compiles_for"] == ["sm_90", "sm_100"]
    assert {"reference", "interpret"} <= set(found["backends"])


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_cuda_driver", lambda: None)
    found = env.facts()
    assert (found["driver"], found["gpus"]) == ("none", [])
    assert found["backends"] == ["reference", "interpret"]


def test_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_cuda_driver", lambda: FakeDriver(status=100))
    assert env.find_gpus() == []


def test_gpus_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_cuda_driver", FakeDriver)
    monkeypatch.setattr(env, "_kernel_driver", lambda: "580.65.06")
    monkeypatch.setattr(env, "installed", lambda package: "13.0.1")
    found = env.facts()
    assert found["gpus"] == ["NVIDIA H200 (sm_90, 132 SMs, 140.0 GiB)", "NVIDIA B200 (sm_100, 132 SMs, 140.0 GiB)"]
    assert found["driver"] == "580.65.06 (CUDA 13.1)"
    assert found["backends"] == ["cuda", "reference", "interpret"]


def test_gpu_we_do_not_compile_for_is_no_backend() -> None:
    assert env.backends([env.Gpu("NVIDIA A100", "sm_80", 108, 80 << 30)]) == ["reference", "interpret"]


def test_cache_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path / "cache"))
    assert env.facts()["cache_size"] == "0.0 MiB"
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels" / "x").write_bytes(bytes(3 << 20))
    (tmp_path / "cache" / "link").symlink_to(tmp_path / "nowhere")
    found = env.facts()
    assert found["cache"] == found["FLINTC_CACHE"] == str(tmp_path / "cache")
    assert found["cache_size"] == "3.0 MiB"


def test_missing_package() -> None:
    assert env.installed("no-such-package-of-ours") == "not installed"
