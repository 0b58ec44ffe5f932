"""The sampler of a plan: the launch that chooses each row's next token on the device."""

from __future__ import annotations

from dataclasses import replace

from flintc.codegen.effects import effects_of
from flintc.codegen.render import render_kernel
from flintc.codegen.selection import Selection, Signature, columns, power_of_two
from flintc.errors import VerificationError
from flintc.ir.graph import Launch
from flintc.ir.plan import Kernel, Plan, PlannedLaunch, Sampler
from flintc.ir.types import TensorType

#: 32-bit words that say how a row chooses: temperature (FP64, low word first), top-p (FP64), seed (64 bits, low word
#: first), top-k (1 to MOST), and the ids that may be chosen, counted from 0.
WORDS = 8

#: Likeliest ids that the choice is made among: the largest top-k that the kernel serves.
MOST = 64

#: Logits of one program.
BLOCK = 4096


def with_sampler(plan: Plan) -> Plan:
    """``plan`` with a sampler on its first output, the logits.

    The choice is that of :func:`flintc.runtime.sampling.sample` for every top-k up to ``MOST``.
    """
    selection = _select(plan)
    if selection.name in plan.kernels:
        raise VerificationError(f"the plan of {plan.graph.name} has a kernel {selection.name} already")
    source = render_kernel(selection, selection.name)
    kernel = Kernel(
        selection.name, source, selection.params, dict(selection.constants), selection.num_warps, selection.num_stages,
        False, paths=effects_of(source, selection.name, selection.params, selection.constants),
    )  # fmt: skip
    launch = PlannedLaunch("sample", kernel.name, selection.grid, selection.args)
    sampler = Sampler((launch,), {s.name: s for s in selection.scratch}, MOST)
    return replace(plan, kernels={**plan.kernels, kernel.name: kernel}, sampler=sampler)


def _select(plan: Plan) -> Selection:
    graph, logits = plan.graph, plan.graph.outputs[0]
    vocab = columns(graph, logits)
    block = min(BLOCK, power_of_two(vocab))
    blocks = -(-vocab // block)
    sig = Signature(graph, Launch("sample", "sample", ()))
    for value in (logits, "seqs", "ids", "positions"):
        sig.value("logits" if value == logits else value, value)
    sig.memory("requests", "requests", TensorType("i32", ("B", WORDS)))
    sig.memory("tokens", "tokens", TensorType("i32", ("B",)))
    sig.memory("logprobs", "logprobs", TensorType("f32", ("B",)))
    sig.memory("best_orders", "best_orders", TensorType("i32", ("B", blocks, MOST)))
    sig.memory("best_ids", "best_ids", TensorType("i32", ("B", blocks, MOST)))
    sig.memory("largest", "largest", TensorType("f32", ("B", blocks)))
    sig.memory("sums", "sums", TensorType("f32", ("B", blocks)))
    sig.memory("arrivals", "arrivals", TensorType("i32", ("B",)))
    return sig.select(
        f"sample_{vocab}",
        "sample.py.j2",
        "A row's next token: temperature, top-k, top-p, one random number of its seed and position.",
        grid=(blocks, "B", 1),
        constants={"VOCAB": vocab, "BLOCK": block, "BLOCKS": blocks, "K": MOST, "WORDS": WORDS},
        num_warps=8,
    )
