"""Measures every planted fault on the trained tiny-flint and writes the tables of docs/numerics.md.

python tests/verify/fault_table.py           # both; about half an hour on one core
python tests/verify/fault_table.py kernels   # or models
"""

from __future__ import annotations

import argparse
import datetime
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from fault_forms import make_form
from faults import FAULTS, Fault
from kernel_faults import KERNEL_FAULTS

from flintc.bench.divergence import Divergence, Verdict, compare, judge
from flintc.bench.runners import InterpretRunner, ReferenceRunner
from flintc.bench.step import prepare_step, run_in_groups
from flintc.bench.subject import open_subject
from flintc.bench.tolerance import Difference
from flintc.bench.verify import compare_launch, kernels_of, make_prompts, oracle_logits, step_prompts

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-flint"
PAGE = ROOT / "docs" / "numerics.md"
#: Names chunks of 16 positions, so that these prompts have many splits, and pages of 8.
SPEC = "tiny-flint"
#: A prompt takes more than one step of 128 rows.
PROMPTS, TOKENS = 64, 200
SOUND = (Fault("none"), Fault("none", "nvfp4"), Fault("none", "nvfp4-7f"), Fault("none", "low-scores"))


def measure(out: Path) -> Iterator[tuple[Fault, Divergence, Divergence, Verdict]]:
    """Each fault, the sound models first: its figures, the yardstick's, the verdict."""
    found = {}
    for fault in (*SOUND, *FAULTS):
        key = fault.form, 2 * TOKENS if fault.tokens else TOKENS
        if key not in found:
            prompts = make_prompts(open_subject(MODEL, spec=SPEC), None, key[1], PROMPTS)
            path = make_form(fault.form, MODEL, MODEL / "tiny-flint.gguf", out, prompts, SPEC)
            found[key] = (path, prompts, *oracle_logits(open_subject(path, spec=SPEC), prompts))
        path, prompts, exact, rounded = found[key]
        with fault.opening():
            subject = fault.of(open_subject(path, spec=SPEC))
        with fault.plant():
            got = subject.logits("reference", prompts)
        ours, yardstick = compare(exact, got, prompts), compare(exact, rounded, prompts)
        yield fault, ours, yardstick, judge(ours, yardstick, prompts)


def model_table(out: Path) -> str:
    """The table of whole models."""
    rows = ["| fault | checkpoint | KL from FP32, mean | times transformers' BF16 | same top-1 | verify |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for fault, ours, _, verdict in measure(out):
        said = {True: "passes", False: "fails", None: "undecided"}[verdict.passed]
        rows.append(
            f"| {fault.name} | {fault.form} | {ours.mean:.2e} | {verdict.ratio:.3g} | {ours.top1:.1%} | {said} |"
        )
        print(rows[-1], flush=True)
    return "\n".join(rows)


def kernel_table(out: Path) -> str:
    """The table of single kernels."""
    rows = ["| fault | kernel | error / allowed as generated | with the fault |", "|---|---|---|---|"]
    ready = {}
    for fault in KERNEL_FAULTS:
        if fault.form not in ready:
            prompts = make_prompts(open_subject(MODEL, spec=SPEC), None, 200, 8)
            path = make_form(fault.form, MODEL, MODEL / "tiny-flint.gguf", out, prompts, SPEC)  # type: ignore[arg-type]
            subject = open_subject(path, spec=SPEC)
            inputs = prepare_step(subject, step_prompts(subject, prompts))
            made = run_in_groups(ReferenceRunner(subject.graph()), inputs, inputs.rows)
            ready[fault.form] = subject, inputs, {**inputs.values, **made}
        subject, inputs, values = ready[fault.form]
        worst: list[Difference] = []
        sound = subject.plan()
        for plan in (sound, fault.plant(sound)):
            runner = InterpretRunner(plan)
            launch = next(uses[-1] for name, uses in kernels_of(runner).items() if fault.concerns(name))
            worst.append(max(compare_launch(runner, launch, inputs, values), key=lambda d: d.excess))
        rows.append(
            f"| {fault.name} | `{launch.role}`, {launch.name} | {worst[0].excess:.2f} | {worst[1].excess:.3g} |"
        )
        print(rows[-1], flush=True)
    return "\n".join(rows)


def write(name: str, table: str) -> None:
    """Put a table between its marks on the page, with the day it was measured."""
    begin, end = f"<!-- {name}: made by tests/verify/fault_table.py -->", f"<!-- end of {name} -->"
    stamp = f"Measured {datetime.date.today()}, torch {torch.__version__}, CPU."
    page = PAGE.read_text(encoding="utf-8")
    new, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{stamp}\n\n{table}\n{end}", page, flags=re.DOTALL
    )
    assert count == 1, f"{PAGE} has no place for {name}"
    PAGE.write_text(new, encoding="utf-8")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=["models", "kernels"], help="models, kernels, or both")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.tables:
            out = Path(folder) / name
            out.mkdir()
            write(name, {"models": model_table, "kernels": kernel_table}[name](out))


if __name__ == "__main__":
    main()
