"""Programmatic dependent launch: the wait and the trigger of a kernel."""

import triton
import triton.language as tl

from flintc.codegen.device.mode import INTERPRET


@triton.jit
def wait_for_producers():
    """Block until every launch before this one has finished and its stores are visible."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents():
    """Let the next launch start. Publishes nothing: the next launch's wait does."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
