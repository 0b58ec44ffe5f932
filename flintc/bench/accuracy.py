"""What each pass of a pipeline costs in accuracy, measured on real text with the generated kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flintc.bench.divergence import kl
from flintc.bench.step import StepInputs, prepare_step, run_in_groups
from flintc.bench.subject import Subject
from flintc.bench.verify import PROMPTS, choose_kernels, make_prompts, oracle_logits, step_prompts

Progress = Callable[[int, int, str], None]
#: Logits of all prompts together, of which three copies are held: FP32, baseline, and the prefix at hand.
_MOST_LOGITS = 2**30


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean KL, in nats, of next-token distributions after one pass: from FP32, and from the unfused kernels.

    positions: how many distributions were compared.
    """

    kl_fp32: float
    kl_baseline: float
    positions: int


def measure_accuracy(
    subject: Subject, steps: Sequence[str], backend: str | None = None, progress: Progress | None = None
) -> dict[str, Accuracy]:
    """Run the kernels of every prefix of the pipeline: ``steps`` are its passes, ``baseline`` first.

    backend: ``cuda`` (the default where there is a GPU: whole prompts), or ``interpret``: one step of eight rows, whose
    caches the reference fills, since Triton's interpreter takes most of a minute for a step of a small model.
    """
    chosen = choose_kernels(backend)
    prompts = make_prompts(subject, None)
    prompts = prompts[: max(1, min(PROMPTS, _MOST_LOGITS // (len(prompts[0]) * subject.vocab)))]
    whole = chosen == "cuda"
    if not whole:
        prompts = [list(ids) for ids in step_prompts(subject, prompts)]
    exact = oracle_logits(subject, prompts, chosen if whole else "cpu", (torch.float32,))[0]
    inputs = None if whole else prepare_step(subject, prompts)
    found: dict[str, Accuracy] = {}
    first: list[Tensor] = []
    for done, step in enumerate(steps):
        made = _logits(subject, chosen, step, prompts, inputs)
        gc.collect()  # the memory of the step before: its graphs and caches
        first = first or made
        if not whole:
            exact = [x[-1:] for x in exact]
        each = [torch.cat([kl(a, b) for a, b in zip(from_, made, strict=True)]) for from_ in (exact, first)]
        found[step] = Accuracy(float(each[0].mean()), float(each[1].mean()), len(each[0]))
        if progress is not None:
            progress(done + 1, len(steps), step)
    return found


def _logits(
    subject: Subject, backend: str, after: str, prompts: Sequence[Sequence[int]], inputs: StepInputs | None
) -> list[Tensor]:
    """Logits per prompt: of every token, or (in a step) of the last one."""
    if inputs is None:
        return subject.logits(backend, prompts, after)
    runner = subject.runner(backend, after)
    made = run_in_groups(runner, inputs, inputs.rows)
    logits = made[runner.graph.outputs[0]]
    return [logits[row : row + 1] for row in range(len(logits))]
