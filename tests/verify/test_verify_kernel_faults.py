"""The check of single kernels on real activations: each passes as generated, and fails with a fault in its text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from fault_forms import make_form
from kernel_faults import KERNEL_FAULTS, KernelFault

from flintc import api
from flintc.bench.runners import InterpretRunner, ReferenceRunner
from flintc.bench.step import StepInputs, prepare_step, run_in_groups
from flintc.bench.subject import Subject, open_subject
from flintc.bench.verify import compare_launch, kernels_of, make_prompts, step_prompts
from flintc.ir.plan import Plan

SPEC = "tiny-flint"
Ready = tuple[Subject, StepInputs, dict]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ready]:
    """A form's checkpoint, a step of it, and every value of that step as the reference has it; made once."""
    out = tmp_path_factory.mktemp("forms")
    folder, file = out / "model", out / "model.gguf"
    api.synth(SPEC, folder)
    api.synth(SPEC, file, format="gguf")

    @cache
    def of(form: str) -> Ready:
        prompts = make_prompts(open_subject(folder, spec=SPEC), None, 64, 8)
        subject = open_subject(make_form(form, folder, file, out, prompts, SPEC), spec=SPEC)
        inputs = prepare_step(subject, step_prompts(subject, prompts))
        made = run_in_groups(ReferenceRunner(subject.graph()), inputs, inputs.rows)
        return subject, inputs, {**inputs.values, **made}

    return of


def passes(plan: Plan, fault: KernelFault, inputs: StepInputs, values: dict) -> bool:
    """Whether the last launch of each kernel that the fault concerns is within its bound."""
    runner = InterpretRunner(plan)
    chosen = [uses[-1] for name, uses in kernels_of(runner).items() if fault.concerns(name)]
    return all(d.passed for launch in chosen for d in compare_launch(runner, launch, inputs, values))


@pytest.mark.parametrize("fault", KERNEL_FAULTS, ids=lambda fault: f"{fault.kernel}: {fault.name}")
def test_fault_in_a_kernel_is_caught(fault: KernelFault, ready: Callable[[str], Ready]) -> None:
    subject, inputs, values = ready(fault.form)
    plan = subject.plan()
    assert passes(plan, fault, inputs, values)
    assert not passes(fault.plant(plan), fault, inputs, values)
