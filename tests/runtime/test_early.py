"""What a process begins before torch is imported."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flintc
from flintc.runtime.early import early_start, read_ahead

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


def test_what_was_made_meanwhile_is_looked_at_with_the_old_and_still_found():
    said = fresh(
        "import gc, weakref\n"
        "from flintc.runtime.early import early_start\n"
        "class Ring: pass\n"
        "with early_start(gpu=False):\n"
        "    ring = Ring(); ring.own = ring; gone = weakref.ref(ring)\n"
        "print(any(one is ring for one in gc.get_objects(generation=2)), gc.get_freeze_count())\n"
        "del ring\n"
        "gc.collect()\n"
        "print(gone())\n"
        "gc.freeze(); kept = gc.get_freeze_count()\n"
        "with early_start(gpu=False): pass\n"
        "print(kept == gc.get_freeze_count() > 0)\n"
    )
    assert said == ["True", "0", "None", "True"]


def resident(path):
    """Share of a file's pages that are in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as pages:
        count = -(-len(pages) // mmap.PAGESIZE)
        told = (ctypes.c_ubyte * count)()
        at = np.frombuffer(pages, np.uint8)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert mincore(at.ctypes.data, len(pages), told) == 0
        del at
        return sum(page & 1 for page in told) / count


@pytest.mark.parametrize("form", ["a file", "a folder"])
def test_files_are_read_into_the_cache(form, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(24 << 20))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file) > 0.1:
        pytest.skip("this file system keeps its files in memory")
    read_ahead(file if form == "a file" else tmp_path)
    assert resident(file) == 1


def test_a_pipe_is_not_waited_for(tmp_path):
    """By a process of its own: one that waits can be ended."""
    os.mkfifo(tmp_path / "model.safetensors")
    code = f"from flintc.runtime.early import read_ahead; read_ahead({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("what", ["org/name", "/no/such/file.gguf"])
def test_what_is_not_here_is_for_others_to_tell(what):
    """Nothing is said of it, not by a thread either."""
    with pytest.raises(OSError, match=what):
        read_ahead(what)
    code = f"from flintc.runtime.early import early_start\nwith early_start({what!r}, gpu=True): print('on')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "on\n", "")


@pytest.mark.parametrize(
    ("asked", "weights", "gpu"),
    [
        ({}, "no/model", True),
        ({"device": "cuda"}, "no/model", True),
        ({"device": "cpu"}, "no/model", False),
        ({"backend": "interpret"}, "no/model", False),
        ({"numerics": "fp32"}, "no/model", False),
        ({"prepared": True}, None, True),
    ],
    ids=str,
)
def test_a_load_begins_what_it_will_need(asked, weights, gpu, monkeypatch):
    begun = []

    def begin(*args, **kwargs):
        begun.append((args, kwargs))
        raise KeyError

    monkeypatch.setattr("flintc.runtime.early.early_start", begin)
    with pytest.raises(KeyError):
        flintc.load("no/model", **asked)
    assert begun == [((weights,), {"gpu": gpu})]


def fresh(code):
    """What ``code`` prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_a_process_may_end_at_once():
    """Libraries that are half loaded when it ends would crash it."""
    said = fresh(
        "import sys\n"
        "from flintc.runtime.early import early_start\n"
        "try:\n"
        "    with early_start(gpu=True): raise ValueError\n"
        "except ValueError:\n"
        "    print('libtorch_cpu.so' in open('/proc/self/maps').read(), 'torch' in sys.modules)\n"
    )
    assert said == ["True", "False"]


def test_torch_is_whole_when_its_libraries_were_mapped_ahead():
    """And they were: they are in the process before torch is imported."""
    said = fresh(
        "import time\n"
        "from flintc.runtime.early import early_start\n"
        "def mapped(): return 'libtorch_cpu.so' in open('/proc/self/maps').read()\n"
        "with early_start(gpu=True):\n"
        "    end = time.monotonic() + 60\n"
        "    while not mapped() and time.monotonic() < end: time.sleep(0.01)\n"
        "    print(mapped())\n"
        "    import torch\n"
        "print(torch.ones(3, dtype=torch.bfloat16).sum().item())\n"
    )
    assert said == ["True", "3.0"]


def test_the_driver_is_there_before_torch_is_mapped(monkeypatch):
    """What is loaded while torch's libraries are waits for them, with Python's lock."""
    done = []
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    driver = SimpleNamespace(cuDriverGetVersion=lambda: done.append("driver"), cuInit=lambda _: 1 / 0)
    monkeypatch.setattr("flintc.runtime.early.load_driver", lambda: driver)
    monkeypatch.setattr("flintc.runtime.early._map_libraries", lambda: done.append("torch"))
    with early_start(gpu=True):
        pass
    assert done == ["driver", "torch"]


def test_loading_imports_no_more_than_it_needs():
    """Triton compiles and interprets, networkx orders launches: neither is for a model that is loaded to run."""
    said = fresh(
        "import sys, flintc\n"
        f"model = flintc.load({str(EXAMPLE)!r}, backend='reference')\n"
        "print(len(model.generate([1, 2, 3], max_tokens=1).token_ids))\n"
        "print([name for name in ('triton', 'networkx', 'matplotlib') if name in sys.modules])\n"
    )
    assert said == ["1", "[]"]


def test_a_model_that_is_dropped_leaves_memory_at_once():
    """The first of a process, too: what importing torch leaves as garbage holds none of the calls that led to it."""
    said = fresh(
        "import gc, weakref, flintc\n"
        f"model = flintc.load({str(EXAMPLE)!r}, backend='reference')\n"
        "gone = [weakref.ref(model.executor), weakref.ref(next(iter(model.executor._given.values())))]\n"
        "gc.disable()\n"
        "del model\n"
        "print([one() is None for one in gone])\n"
    )
    assert said == ["[True,", "True]"]
