"""Every planted fault is caught by the verdict on the whole model; without one, the same model passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fault_forms import make_form
from faults import FAULTS, Fault, Form
from torch import Tensor

from flintc import api
from flintc.bench.divergence import Divergence, compare, judge
from flintc.bench.subject import open_subject
from flintc.bench.verify import make_prompts, oracle_logits

SPEC = "tiny-flint"
#: Several windows (13) and several steps of ROWS rows, but less than a verdict needs to pass a model.
TOKENS, PROMPTS, ROWS = 64, 12, 16

Found = tuple[Path, list[list[int]], list[list[Tensor]]]
Measure = Callable[[str, int], Found]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """The checkpoint of a form, prompts, and the oracle's logits on them in FP32 and BF16; made once."""
    out = tmp_path_factory.mktemp("forms")
    folder, file = out / "model", out / "model.gguf"
    api.synth(SPEC, folder)
    api.synth(SPEC, file, format="gguf")

    @cache
    def of(form: Form, tokens: int) -> Found:
        prompts = make_prompts(open_subject(folder, spec=SPEC), None, tokens or TOKENS, PROMPTS)
        path = make_form(form, folder, file, out, prompts, SPEC)
        return path, prompts, oracle_logits(open_subject(path, spec=SPEC), prompts)

    return of


def verdict(fault: Fault, found: Found) -> tuple[Divergence, bool | None]:
    """The whole-model figures under a fault, and whether they pass."""
    path, prompts, (exact, rounded) = found
    with fault.opening():
        subject = fault.of(open_subject(path, spec=SPEC), ROWS)
    with fault.plant():
        got = subject.logits("reference", prompts)
    ours = compare(exact, got, prompts)
    return ours, judge(ours, compare(exact, rounded, prompts), prompts).passed


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "nvfp4-7f", "low-scores"])
def test_sound_model_is_not_refused(form: str, measure: Measure) -> None:
    ours, passed = verdict(Fault("none", form), measure(form, 0))
    assert ours.mean < 0.05 and passed is None  # so little text can refuse a model, but not pass one


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault, measure: Measure) -> None:
    ours, passed = verdict(fault, measure(fault.form, fault.tokens))
    print(f"KL {ours.mean:.3g}")
    assert passed is False
