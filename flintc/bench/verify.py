"""``flintc verify``: each kernel against the reference on real activations, the whole model against an FP32 forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flintc.bench.divergence import LEAST_TOKENS, Divergence, Tally, Verdict, judge, losses, mean_perplexity
from flintc.bench.runners import ReferenceRunner, Runner, Values
from flintc.bench.step import ROWS, StepInputs, filler, new_caches, prepare_step, run_in_groups
from flintc.bench.subject import Subject, check_backend, default_backend, run_prompts
from flintc.bench.tolerance import Difference, compare_value, roundings
from flintc.errors import BackendError, UsageError
from flintc.ir.graph import Graph, Launch
from flintc.ir.plan import Plan
from flintc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flintc.bench.oracle import Oracle

Progress = Callable[[int, int, str], None]

#: Prompts by default: three times what a verdict needs, since a few positions at which an expert flips carry most of
#: the KL.
PROMPTS = 64


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One kernel on real activations: the launch that stood for it, and the worst value that launch made."""

    kernel: str
    role: str
    launch: str
    launches: int
    worst: Difference

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        names = ("kernel", "role", "launch", "launches")
        return {**{name: getattr(self, name) for name in names}, **self.worst.to_json(), "passed": self.worst.passed}


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The whole model as one executor runs it, against FP32; ``path`` says how it ran."""

    path: str
    divergence: Divergence
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        v = self.verdict
        judged = {"ratio": v.ratio, "ratio_upper": v.upper, "reason": v.reason, "passed": v.passed}
        return {"path": self.path, **self.divergence.to_json(), **judged}


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``flintc verify`` found; ``yardstick`` is transformers' BF16, ``exact`` the perplexity in FP32.

    models: the whole model, once for each way in which the backend runs a prompt.
    """

    checkpoint: str
    weights: str
    kernels_path: str
    prompts: int
    tokens: int
    kernels: tuple[KernelCheck, ...]
    models: tuple[ModelCheck, ...]
    yardstick: Divergence
    exact: float

    @property
    def passed(self) -> bool | None:
        """Every kernel within its bound, and the model within the pooled one; None: too little text to tell."""
        said = [k.worst.passed for k in self.kernels] + [m.verdict.passed for m in self.models]
        return False if False in said else None if None in said else True

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "checkpoint": self.checkpoint,
            "weights": self.weights,
            "kernels_path": self.kernels_path,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "kernels": [k.to_json() for k in self.kernels],
            "flintc": [m.to_json() for m in self.models],
            "transformers_bf16": self.yardstick.to_json(),
            "perplexity_fp32": self.exact,
            "passed": self.passed,
        }


def default_text() -> str:
    """Text to measure on: parts of CPython's standard library (PSF License 2.0) that tiny-flint was not trained on."""
    return resources.files("flintc.bench").joinpath("verify.txt").read_text(encoding="utf-8")


def make_prompts(
    subject: Subject, text: str | None, tokens: int | None = None, count: int = PROMPTS
) -> list[list[int]]:
    """Up to ``count`` prompts of ``tokens`` ids (default: enough to leave every window) cut from ``text``.

    Random ids where the checkpoint has no tokenizer; UsageError for a text then, or one with fewer than two ids.
    """
    windows = [w for w in _windows(subject) if w is not None]
    length = tokens or max(LEAST_TOKENS, max(windows, default=0) * 5 // 4)
    length = min(length, subject.model.dims.get("context", length))
    if not isinstance(subject.tokenizer, Tokenizer):
        if text is not None:
            raise UsageError(f"a text needs a tokenizer: {subject.tokenizer}")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(subject.vocab, (count, length), generator=generator).tolist()
    ids = subject.tokenizer.encode(text if text is not None else default_text())
    whole = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)][:count]
    if not whole and len(ids) < 2:
        raise UsageError("the text is too short to predict anything in it")
    return whole or [ids]


def _windows(subject: Subject) -> Iterator[int | None]:
    for op in subject.graph("baseline").ops.values():
        if op.kind == "attention_partial":
            window = op.attrs["window"]
            yield window if isinstance(window, int) else None


def step_prompts(subject: Subject, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Prompts whose last tokens are the rows of a step: around the window's edge, short, and long."""
    edge = next((w for w in _windows(subject) if w is not None), 32)
    lengths = [edge, edge + 1, edge - 1, 1, edge // 2 + 1, 2 * edge, edge + edge // 4, 3 * edge]
    return [ids[: max(1, min(n, len(ids)))] for ids, n in zip(_cycle(prompts), lengths[:ROWS], strict=False)]


def _cycle(prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    while True:
        yield from prompts


def check_kernels(
    runner: Runner, inputs: StepInputs, *, every: bool = False, progress: Progress | None = None
) -> list[KernelCheck]:
    """Run launches on the values that the reference gives them, and compare what they make.

    One launch for each kernel, from the middle of the model; ``every``: all of them, the worst of each kernel. A kernel
    that another one stands in for in steps of several rows is checked on the last row alone.
    """
    found = _check_kernels(runner, inputs, (), every, progress)
    alone, known = inputs.group(slice(-1, None)), [check.kernel for check in found]
    return found + _check_kernels(runner, alone, known, every, progress)


def _check_kernels(
    runner: Runner, inputs: StepInputs, known: Sequence[str], every: bool, progress: Progress | None
) -> list[KernelCheck]:
    """Of the kernels that a step of ``inputs`` runs those that are not ``known``."""
    shared = {name: uses for name, uses in kernels_of(runner, inputs.rows).items() if name not in known}
    if not shared:
        return []
    reference = ReferenceRunner(runner.graph, runner.device)
    values: Values = {**inputs.values, **run_in_groups(reference, inputs, inputs.rows)}
    chosen = [x for uses in shared.values() for x in (uses if every else [uses[len(uses) // 2]])]
    worst: dict[str, KernelCheck] = {}
    for done, launch in enumerate(chosen, 1):
        kernel = next(name for name, uses in shared.items() if launch in uses)
        for found in compare_launch(runner, launch, inputs, values):
            check = KernelCheck(kernel, launch.role, launch.name, len(shared[kernel]), found)
            if kernel not in worst or found.excess > worst[kernel].worst.excess:
                worst[kernel] = check
        if progress is not None:
            progress(done, len(chosen), launch.name)
    return list(worst.values())


def kernels_of(runner: Runner, rows: int = ROWS) -> dict[str, list[Launch]]:
    """Launches by the kernel that serves them in a step of ``rows`` rows; by role where there are no kernels."""
    plan: Plan | None = getattr(runner, "plan", None)
    served = {x.name: plan.kernel_for(x, rows).name for x in plan.launches} if plan is not None else {}
    found: dict[str, list[Launch]] = {}
    for launch in runner.graph.launches:
        found.setdefault(served.get(launch.name, launch.role), []).append(launch)
    return found


def compare_launch(runner: Runner, launch: Launch, inputs: StepInputs, values: Values) -> list[Difference]:
    """Run one launch on ``values`` and compare each value that leaves it; the caches it writes are copies."""
    graph = runner.graph
    given = dict(values)
    for name in graph.reads(launch):
        tensor = values[name]
        if graph.values[name].kind == "cache" and isinstance(tensor, Tensor):
            given[name] = tensor.clone()
    made = runner.run(launch, given, inputs.env) | new_caches(graph, launch, given)
    depth = roundings(graph, launch.ops)
    return [
        compare_value(graph, launch, name, made[name], values, depth) for name in leaving(graph, launch) if name in made
    ]


def leaving(graph: Graph, launch: Launch) -> list[str]:
    """What a launch makes that another one reads, later versions of caches included."""
    caches = [v for o in launch.ops if graph.ops[o].kind == "kv_write" for v in graph.ops[o].outputs]
    return [*dict.fromkeys([*caches, *graph.writes(launch)])]


def verify_model(
    subject: Subject, prompts: Sequence[Sequence[int]], backend: str, device: str, progress: Progress | None = None
) -> tuple[tuple[ModelCheck, ...], Divergence, float]:
    """flintc and transformers' BF16 against transformers' FP32, on each prompt; the latter's perplexity.

    device: where transformers runs and distributions are compared. Of all logits those of one prompt are in memory.
    """
    executors = subject.executors(backend, max(map(len, prompts)))
    ours, yardstick, lost = [Tally() for _ in executors], Tally(), []
    dtypes = (torch.float32, torch.bfloat16)
    for ids, (exact, rounded) in zip(prompts, _oracle(subject, device).logits(prompts, dtypes, progress), strict=True):
        for executor, tally in zip(executors.values(), ours, strict=True):
            (got,) = run_prompts(executor, [ids])
            tally.add(exact, got.to(device), ids)
        yardstick.add(exact, rounded, ids)
        lost.append(losses(exact, ids))
    measure = yardstick.result()
    found = [(path, tally.result()) for path, tally in zip(executors, ours, strict=True)]
    models = tuple(ModelCheck(path, d, judge(d, measure, prompts)) for path, d in found)
    return models, measure, mean_perplexity(lost)


def oracle_logits(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> list[list[Tensor]]:
    """Logits of transformers, which runs on ``device``, once per dtype; they lie on the CPU.

    BackendError where transformers is not installed.
    """
    made = [[x.cpu() for x in each] for each in _oracle(subject, device).logits(prompts, dtypes)]
    return [list(of_dtype) for of_dtype in zip(*made, strict=True)]


def _oracle(subject: Subject, device: str) -> Oracle:
    return find_oracle()(subject.path, subject.config, device)


def find_oracle() -> type[Oracle]:
    """What runs transformers; BackendError where it is not installed."""
    try:
        from flintc.bench.oracle import Oracle
    except ImportError as error:
        remedy = "pip install 'flintc[verify]'"
        raise BackendError(f"the FP32 forward needs transformers: {error}", remedy=remedy) from error
    return Oracle


def choose_backends(backend: str | None = None, kernels: str | None = None) -> tuple[str, str]:
    """What :func:`verify` runs the whole model and single launches on; errors as for :func:`choose_kernels`."""
    whole = backend or default_backend()
    check_backend(whole)
    return whole, choose_kernels(kernels)


def choose_kernels(kernels: str | None = None) -> str:
    """The backend of single launches (default: cuda where there is a GPU, else interpret).

    UsageError where it does not exist; BackendError where it cannot run here, or there is nothing to compare it with.
    """
    chosen = kernels or default_backend("interpret")
    check_backend(chosen)
    find_oracle()
    return chosen


def verify(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    backend: str | None = None,
    kernels: str | None = None,
    *,
    every: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Everything ``flintc verify`` reports.

    backend: runs the whole model (default: cuda where there is a GPU, else reference). kernels: runs single launches
    (default: cuda, else interpret). every: check each launch, not one per kernel.
    """
    backend, kernels = choose_backends(backend, kernels)
    runner = subject.runner(kernels)
    inputs = prepare_step(subject, step_prompts(subject, prompts), filler(runner), runner.device)
    checks = check_kernels(runner, inputs, every=every, progress=progress)
    models, yardstick, exact = verify_model(subject, prompts, backend, subject.device, progress)
    return Verification(
        str(subject.path), subject.format, kernels, len(prompts), sum(map(len, prompts)), tuple(checks), models,
        yardstick, exact,
    )  # fmt: skip
