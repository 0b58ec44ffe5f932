"""How long ago this process started."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
#: Of the fields that follow the program's name: when the process started, in ticks since the system did.
_STARTED = 19


def seconds_since_start() -> float | None:
    """Seconds since the system made this process, Python's own start included; None where the system does not tell.

    Told to a hundredth of a second. A program that a shell has replaced itself with counts from the shell's start.
    """
    try:
        # The name is in brackets, and may have blanks and brackets of its own.
        fields = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        return None
