"""The lint on what the compiler makes: all of Flint's kernels pass, planted hazards do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jinja2
import pytest
from graphs import baseline

from flintc.codegen import render
from flintc.codegen.aot import TARGETS, compile_kernels
from flintc.codegen.effects import effects_of
from flintc.codegen.lint import check_compiled, lint
from flintc.codegen.planner import plan
from flintc.codegen.sampler import with_sampler
from flintc.errors import VerificationError
from flintc.ir.build import Weights
from flintc.ir.plan import Effect, Kernel, Param, Plan
from flintc.passes import PASSES, run_pipeline
from flintc.safety import check_plan


def planned(spec: str, weights: Weights = "bf16") -> Plan:
    return plan(run_pipeline(baseline(spec, weights), list(PASSES)).graph)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_the_whole_flint_bundle(weights: Weights) -> None:
    """Every kernel of Flint does, in PTX and machine code, what its source states, and waits once on every path."""
    made = with_sampler(planned("flint", weights))
    compiled = compile_kernels(made.kernels.values(), list(TARGETS))
    assert all(made.kernels[x.kernel].waits for x in made.launches)
    assert len(compiled) == len(made.kernels) * len(TARGETS)
    check_compiled(made.kernels, compiled.values())


#: The wait, and what the template of the norms has below it.
PLACE = """\
{{ pdl_wait() }}
    at = row * WIDTH + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
"""


@pytest.fixture
def planted() -> Iterator[None]:
    """In the template of the norms, the load of x stands above the wait."""
    environment = render._environment()
    sound = environment.loader
    assert sound is not None
    text = sound.get_source(environment, "norm.py.j2")[0]
    wait, *lines = PLACE.splitlines(keepends=True)
    assert PLACE in text, "the template has changed: plant the hazard elsewhere"
    hoisted = text.replace(PLACE, "".join([*lines, wait]))
    environment.loader = jinja2.ChoiceLoader([jinja2.DictLoader({"norm.py.j2": hoisted}), sound])
    environment.cache.clear()  # type: ignore[union-attr]
    yield
    environment.loader = sound
    environment.cache.clear()  # type: ignore[union-attr]


def test_a_hazard_planted_in_a_template(planted: None) -> None:
    """The checker refuses the plan; and were its source taken for sound, the lint would find it in the code."""
    made = planned("tiny-flint")
    with pytest.raises(VerificationError, match=r"launch L0.norm: it loads residual in buffer0 above its wait, while"):
        check_plan(made)
    kernel = next(k for k in made.kernels.values() if k.name.startswith("norm"))
    path = kernel.paths[0]
    wait, load = (next(e for e in path if (e.kind, e.param) == key) for key in (("wait", ""), ("read", "x_ptr")))
    rest = [e for e in path if e not in (wait, load)]
    stated = replace(kernel, paths=((*rest[:-1], wait, load, rest[-1]),))
    found = lint(stated, *compile_kernels([stated], ["sm_90"]).values())
    assert found == [
        "its PTX has a read through x_ptr above the wait, which its source does not state there",
        "its machine code loads through x_ptr above the wait, its source does not",
    ]


PIPELINED = '''\
import triton
import triton.language as tl


@triton.jit
def pipelined(x_ptr, w_ptr, y_ptr, steps, SIZE: tl.constexpr):
    """The wait stands in a loop that the compiler pipelines, ahead of the load that depends on it."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    sum = tl.zeros((SIZE, SIZE), tl.float32)
    for i in tl.range(0, steps, num_stages=3):
        w = tl.load(w_ptr + i * SIZE * SIZE + at)
        tl.extra.cuda.gdc_wait()
        sum = tl.dot(w, tl.load(x_ptr + i * SIZE * SIZE + at), sum)
    tl.store(y_ptr + at, sum)
'''


def test_a_wait_inside_a_pipelined_loop() -> None:
    """The compiler hoists the copies of later turns above the wait: the code shows it, whatever the source says."""
    params = (
        *(Param(f"{n}_ptr", "*bf16") for n in "xw"),
        Param("y_ptr", "*fp32"),
        Param("steps", "i32", aligned=False),
    )
    kernel = Kernel("pipelined", PIPELINED, params, {"SIZE": 64}, 4, 3, True)
    paths = effects_of(PIPELINED, "pipelined", params, kernel.constants)
    assert Effect("wait", sure=False) in paths[0]
    claimed = tuple(replace(e, sure=True) for e in paths[0])
    found = lint(replace(kernel, paths=(claimed,)), *compile_kernels([kernel], ["sm_90"]).values())
    assert any("not at all or once or more than once" in message for message in found)
    assert "its PTX has a read through x_ptr above the wait, which its source does not state there" in found
    assert "its machine code loads through x_ptr above the wait, its source does not" in found


def test_an_error_names_kernel_and_target() -> None:
    made = planned("tiny-flint")
    kernel = next(k for k in made.kernels.values() if k.name.startswith("norm"))
    compiled = compile_kernels([kernel], ["sm_90"])
    silent = replace(kernel, paths=(tuple(e for e in kernel.paths[0] if e.param != "weight_ptr"),))
    with pytest.raises(
        VerificationError, match=rf"differs from what its kernel states: {kernel.name} for sm_90: its PTX"
    ):
        check_compiled({kernel.name: silent}, compiled.values(), machine_code=False)
