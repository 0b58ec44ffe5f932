"""Worker processes that compile kernels side by side.

They are started as plain subprocesses, not through multiprocessing: that would import the caller's main module again
in every worker, or fork a process that may hold threads and a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

WORKER = Path(__file__).with_name("aot_worker.py")

#: Variables that would change what the compiler does; a bundle may depend on its inputs only.
_COMPILER_VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "PTXAS_", "DISABLE_PTXAS", "USE_IR_LOC", "PYTHONHASHSEED")

Request = Mapping[str, Any]
Reply = dict[str, Any]


def run_requests(requests: Sequence[Request], workers: int) -> Iterator[tuple[int, Reply]]:
    """Compile ``requests`` on at most ``workers`` processes; yields (index, reply) in order of completion.

    A reply lists what was ``compiled``, and holds ``error`` and ``details`` where that is not all. Closing the
    iterator early ends the workers.
    """
    if not requests:
        return
    with (
        tempfile.TemporaryDirectory(prefix="flintc-aot-") as folder,
        contextlib.ExitStack() as running,
        selectors.DefaultSelector() as ready,
    ):
        waiting = iter(enumerate(requests))
        for number, (index, request) in zip(range(workers), waiting, strict=False):
            worker = running.enter_context(_Worker(Path(folder) / str(number)))
            worker.send(request)
            ready.register(worker.replies, selectors.EVENT_READ, (worker, index))
        while ready.get_map():
            for key, _ in ready.select():
                worker, index = key.data
                yield index, worker.receive()
                following = next(waiting, None)
                if following is None:
                    ready.unregister(worker.replies)
                else:
                    index, request = following
                    worker.send(request)
                    ready.modify(worker.replies, selectors.EVENT_READ, (worker, index))


class _Worker:
    """One compiling process. A context manager: leaving it ends the process."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self._log = home / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # -P: without it the worker's folder would come first on its path, and modules of ours shadow Python's.
                [sys.executable, "-P", str(WORKER), str(home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(home),
                # An interrupt typed at the terminal is the parent's to handle.
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.replies = self._process.stdout
        self._requests = self._process.stdin

    def send(self, request: Request) -> None:
        """Hand over a request; the worker must be idle."""
        with contextlib.suppress(BrokenPipeError):  # the missing reply will tell
            self._requests.write(json.dumps(request).encode("ascii") + b"\n")
            self._requests.flush()

    def receive(self) -> Reply:
        """The reply to the request sent last."""
        line = self.replies.readline()
        if line.endswith(b"\n"):
            reply = cast(Reply, json.loads(line))
        else:
            status = self._process.wait()
            how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            reply = {"compiled": [], "error": f"the compiler process died ({how})", "details": ""}
        if "error" in reply:
            reply["details"] += self._log.read_text(errors="replace")
        return reply

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # The group, since ptxas may be running under the worker.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self.replies.close()


def _environment(home: Path) -> dict[str, str]:
    """Ours, less what steers the compiler; its cache and temporary files stay in ``home``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_COMPILER_VARIABLES)}
    return kept | {
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(home),
        "TRITON_HOME": str(home),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
