"""The reference: any graph run by torch, at the rounding points or all in FP32."""

from flintc.reference.context import Context, Numerics
from flintc.reference.executor import run, run_launch, run_op
from flintc.reference.nvfp4 import Nvfp4
from flintc.reference.rope import rope_table

__all__ = ["Context", "Numerics", "Nvfp4", "rope_table", "run", "run_launch", "run_op"]
