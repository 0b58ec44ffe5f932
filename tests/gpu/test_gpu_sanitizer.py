"""compute-sanitizer over every launch of tiny-flint: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from replay_cases import machine_code

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("sanitized.py")
FOUND = 86


def sanitizer() -> str:
    """The tool; a machine with a GPU must have it."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.fail("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    return tool


def sanitized(tool: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the script under one of the sanitizer's tools; skips where the machine does not let it see the GPU."""
    command = [sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # cuda-bindings asks older drivers for functions that they lack
    command += [sys.executable, str(SCRIPT), *args]
    folders = [str(SCRIPT.parent), str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    # One allocation per tensor, so that running over its end is an error.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this GPU here")
    return done


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str, weights: str) -> None:
    machine_code(weights)
    done = sanitized(tool, weights)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ran" in done.stdout


def test_the_tool_finds_what_is_wrong() -> None:
    """A position past the context names a row past the end of the block table."""
    machine_code("bf16")
    assert sanitized("memcheck", "bf16", "1000000").returncode == FOUND
