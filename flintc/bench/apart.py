"""One measurement in a process of its own: nothing is left of it on the GPU, and it can be ended in time.

A process that the profiler has looked at takes longer between any two launches from then on, and the first kernels that
a process runs are favoured; measurements that are to be compared start alike only in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flintc.errors import FlintcError, MeasurementError

T = TypeVar("T")
_LONGEST = 200  # characters of a failure's first line


def run_apart(call: Callable[..., T], *args: Any, limit: float | None = None) -> T:
    """``call(*args)`` in a fresh process, which is gone when this returns.

    call: a function of a module, whose arguments and result can be pickled. limit: seconds, start included.
    Raises the errors of flintc that it raises, and MeasurementError for others, and where the process ends without a
    result or takes longer.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, call, args))
    process.start()
    # This side's copy: while it is open, a process that dies does not end the stream.
    sender.close()
    try:
        if not receiver.poll(limit):
            raise MeasurementError(f"not done after {limit:g} s")
        failure, result = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        raise MeasurementError(f"the process ended without a result, exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def _serve(sender: Connection, call: Callable[..., object], args: tuple[Any, ...]) -> None:
    """The other process: sends (failure, result)."""
    # The process that waits ends this one when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output belongs to the command's own answer.
    os.dup2(2, 1)
    try:
        outcome = pickle.dumps((None, call(*args)))
    except Exception as error:
        outcome = pickle.dumps((_portable(error), None))
    # As bytes: what torch registers for a connection hands tensors over by asking this process for them, later.
    sender.send_bytes(outcome)


def _portable(error: Exception) -> FlintcError:
    """``error`` as it can be told to another process, with its traceback as a note."""
    told = MeasurementError(failure_text(error))
    if isinstance(error, FlintcError):
        # One with arguments of its own may not come out as it went in.
        with contextlib.suppress(Exception):
            told = pickle.loads(pickle.dumps(error))
    told.add_note(traceback.format_exc())
    return told


def failure_text(error: BaseException) -> str:
    """One line on ``error``: its class, and the first line that it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f": {lines[0]}" if lines else ""
    return f"{type(error).__name__}{said}"[:_LONGEST]
