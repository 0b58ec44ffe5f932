"""What a process begins before torch is imported."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from flintc.runtime.cuda.early import early_start

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_again_afterwards_if_it_was_before(collecting):
    was = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(ValueError, match="in between"), early_start(gpu=False):
            assert not gc.isenabled()
            raise ValueError("in between")
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if was else gc.disable)()


def fresh(code):
    """What ``code`` prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_torch_is_whole_when_its_libraries_were_mapped_ahead():
    """And they were: they are in the process before torch is imported."""
    said = fresh(
        "import time\n"
        "from flintc.runtime.cuda.early import early_start\n"
        "def mapped(): return 'libtorch_cpu.so' in open('/proc/self/maps').read()\n"
        "with early_start(gpu=True):\n"
        "    end = time.monotonic() + 60\n"
        "    while not mapped() and time.monotonic() < end: time.sleep(0.01)\n"
        "    print(mapped())\n"
        "    import torch\n"
        "print(torch.ones(3, dtype=torch.bfloat16).sum().item())\n"
    )
    assert said == ["True", "3.0"]


def test_loading_imports_no_more_than_it_needs():
    """Triton compiles and interprets, networkx orders launches: neither is for a model that is loaded to run."""
    said = fresh(
        "import sys, flintc\n"
        f"model = flintc.load({str(EXAMPLE)!r}, backend='reference')\n"
        "print(len(model.generate([1, 2, 3], max_tokens=1).token_ids))\n"
        "print([name for name in ('triton', 'networkx', 'matplotlib') if name in sys.modules])\n"
    )
    assert said == ["1", "[]"]
