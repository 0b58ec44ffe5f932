"""`flintc bench timeline` without a GPU: kernels that note their times, and what is made of the notes."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from graphs import pipeline

from flintc.bench.stamps import stamped, stamped_source, stamps_of
from flintc.bench.timeline import Hop, Timeline, hops_of, measure_timeline
from flintc.codegen.aot import compile_kernels
from flintc.codegen.general import with_general
from flintc.codegen.planner import plan
from flintc.codegen.sampler import with_sampler
from flintc.errors import BackendError, VerificationError
from flintc.ir.plan import Kernel

SOURCE = '''\
import triton
import triton.language as tl


@triton.jit
def twice(
    x_ptr,
    B,
):
    """Twice x."""
    row = tl.program_id(0)
    wait_for_producers()
    if row >= B:
        return
    tl.store(x_ptr + row, 2 * tl.load(x_ptr + row))
'''


def entry_of(kernel: Kernel) -> ast.FunctionDef:
    (found,) = (n for n in ast.parse(kernel.source).body if isinstance(n, ast.FunctionDef) and n.name == kernel.name)
    return found


def test_a_source_is_stamped_where_a_program_starts_has_waited_and_ends() -> None:
    body = stamped_source(SOURCE, "twice", waits=True).split('"""Twice x."""\n')[1]
    assert (
        body
        == """\
    started = time_of_program()
    row = tl.program_id(0)
    wait_for_producers()
    waited = time_of_program()
    if row >= B:
        stamp_program(stamps_ptr, started, waited)
        return
    tl.store(x_ptr + row, 2 * tl.load(x_ptr + row))
    stamp_program(stamps_ptr, started, waited)
"""
    )


def marks(source: str, waits: bool) -> str:
    """What a stamped source notes, in the order of its lines: that it has started, has waited, ends."""
    body = stamped_source(source, "twice", waits).split('"""Twice x."""\n')[1]
    return "".join(
        re.findall(r"^ *(s|w|e)(?=tarted =|aited =|_program)", body.replace("stamp_program", "e_program"), re.M)
    )


def test_a_return_right_below_the_wait_is_noted_after_it() -> None:
    assert marks(SOURCE.replace("    if row >= B:\n        return\n", "    return\n"), waits=True) == "swee"


def test_what_does_not_wait_has_waited_when_it_starts() -> None:
    assert marks(SOURCE.replace("    wait_for_producers()\n", ""), waits=False) == "swee"


@pytest.mark.parametrize(
    "text", [SOURCE.replace(":\n        return", ": return"), SOURCE.replace("(\n    x_ptr,\n    B,\n)", "(x_ptr, B)")]
)
def test_several_things_on_a_line_are_refused(text: str) -> None:
    assert text != SOURCE
    with pytest.raises(VerificationError, match="twice has several statements, or parameters, on a line"):
        stamped_source(text, "twice", True)


def test_a_text_may_end_without_a_newline() -> None:
    assert stamped_source(SOURCE.rstrip("\n"), "twice", True) == stamped_source(SOURCE, "twice", True)


def test_a_wait_elsewhere_is_refused() -> None:
    with pytest.raises(VerificationError, match="twice waits in a function that it calls"):
        stamped_source(SOURCE.replace("    wait_for_producers()\n", ""), "twice", waits=True)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_every_kernel_of_flint_can_be_stamped(weights: str) -> None:
    made = plan(pipeline("flint", weights).graph)  # type: ignore[arg-type]
    found = stamped(with_general(with_sampler(made)))
    assert found.kernels.keys() == made.kernels.keys()
    assert (found.sampler, found.general) == (None, None)
    for kernel in found.kernels.values():
        entry = entry_of(kernel)
        assert [a.arg for a in entry.args.args][: len(kernel.params)] == [p.name for p in kernel.params]
        returns = sum(isinstance(n, ast.Return) for n in ast.walk(entry))
        ends = ast.unparse(entry).count("stamp_program(stamps_ptr, started, waited)")
        assert ends == returns + (not isinstance(entry.body[-1], ast.Return)) >= 1
    for launch in found.launches:
        assert launch.args[0].ref == stamps_of(launch.name) in found.scratch
        assert len(launch.args) == len(found.kernels[launch.kernel].params)


def test_a_stamped_kernel_compiles() -> None:
    found = stamped(plan(pipeline("tiny-flint").graph)).kernels
    names = [name for name in found if name.startswith(("topk", "add_norm"))]
    for compiled in compile_kernels([found[name] for name in names], ["sm_90"]).values():
        assert compiled.ptx.count("%globaltimer") == 3 and "%smid" in compiled.ptx


def times(*programs: tuple[int, int, int, int], origin: int = 0) -> torch.Tensor:
    """Stamps as the device leaves them: low words, signed."""
    rows = torch.tensor(programs)
    rows[:, :3] += origin
    return rows.to(torch.int32).long()


@pytest.mark.parametrize("origin", [0, (1 << 31) - 1500, (1 << 32) - 1500])
def test_hops(origin: int) -> None:
    """Wherever the clock's low word starts again."""
    stamps = {
        "a": times((0, 100, 1000, 7), (50, 100, 2000, 8), origin=origin),
        "b": times((500, 2400, 3000, 7), (600, 2500, 3500, 7), (2600, 2700, 4000, 8), origin=origin),
    }
    first, second = hops_of(stamps, {"a": "k", "b": "m"})
    assert (first.hop, first.work, first.slowest) == pytest.approx((2.0, 0.9, 1.9))
    assert second == Hop(
        "b", "m", 3, *map(pytest.approx, (2.0, 1.4, 0.5, 0.7, 1.0, 1.3, 0.5)), 2  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_middle_launch_of_a_kernel() -> None:
    def hop(us: float, fullest: int) -> Hop:
        return Hop(f"L{fullest}", "k", 3, us, us, us, us, us, us, us, fullest)

    found = Timeline("flint", "bf16", 1, 1, "a GPU", 1.0, 1.0, (hop(1.0, 1), hop(5.0, 2), hop(2.0, 1)))
    middle = found.by_kernel()["k"]
    assert (middle.launch, middle.hop, middle.tail, middle.fullest) == ("L1", 2.0, 2.0, 2)


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    with pytest.raises(BackendError, match="needs a GPU"):
        measure_timeline("tiny-flint", "bf16", None, 100, 1, 1, None)
