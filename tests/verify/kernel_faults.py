"""The same faults planted in the text or the constants of generated kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from flintc.ir.plan import Kernel, Plan


@dataclass(frozen=True)
class KernelFault:
    """A change of every kernel whose name begins with the pattern ``kernel``."""

    name: str
    form: str
    kernel: str
    change: Callable[[Kernel], Kernel]

    def concerns(self, name: str) -> bool:
        """Whether the kernel of this name gets the fault."""
        return re.match(self.kernel, name) is not None

    def plant(self, plan: Plan) -> Plan:
        """``plan`` with the fault."""
        kernels = {n: self.change(k) if self.concerns(n) else k for n, k in plan.kernels.items()}
        assert kernels != plan.kernels, f"{self.name}: no kernel {self.kernel}"
        return replace(plan, kernels=kernels)


def text(old: str, new: str) -> Callable[[Kernel], Kernel]:
    """Another text, which must be there."""

    def change(kernel: Kernel) -> Kernel:
        assert old in kernel.source, f"{kernel.name} does not say {old!r}"
        return replace(kernel, source=kernel.source.replace(old, new))

    return change


def constant(name: str, by: int) -> Callable[[Kernel], Kernel]:
    """A constant off by so much."""
    return lambda k: replace(k, constants={**k.constants, name: k.constants[name] + by})


KERNEL_FAULTS = (
    KernelFault("window one position short", "bf16", "attention_partial_window", constant("WINDOW", -1)),
    KernelFault("window one position long", "bf16", "attention_partial_window", constant("WINDOW", 1)),
    KernelFault("sinks missing", "bf16", "attention_merge_window", text(" + tl.exp(sink - top)", "")),
    KernelFault(
        "sink counted once per split", "bf16", "attention_merge_full",
        text("tl.exp(sink - top)", "count * tl.exp(sink - top)"),
    ),
    KernelFault(
        "power of two for the sink's share of a merge", "bf16", "attention_merge_full",
        text("tl.exp(sink - top)", "tl.exp2(sink - top)"),
    ),
    KernelFault(
        "a partial merged without its maximum", "bf16", "attention_merge_full",
        text("share = tl.exp(m - top)", "share = tl.where(live, 1.0, 0.0)"),
    ),
    KernelFault("routing weights not renormalised", "bf16", "topk", constant("RENORMALIZE", -1)),
    KernelFault("epsilon 1e-6 when all scores are near 0", "low-scores", "topk", text("1e-20", "1e-6")),
    KernelFault(
        "one scale for all experts", "nvfp4", "expert_down",
        text("(weight_scale_ptr + expert * N)", "(weight_scale_ptr + 0 * expert)"),
    ),
    KernelFault(
        "two codes of eight swapped", "nvfp4", "expert_down",
        text("c2, c3 = values_of_halves", "c3, c2 = values_of_halves"),
    ),
    KernelFault(
        "output scale left out", "nvfp4", r"linear_\d+x\d+_nvfp4_f32",
        text("SPLIT) * scale", "SPLIT) * SUM_UNIT"),
    ),
)  # fmt: skip
