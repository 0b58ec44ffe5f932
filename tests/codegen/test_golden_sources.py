"""The kernels of tiny-flint as text: what each entry does, the helpers it calls, and that all of it is fit to read.

The golden files hold headers and entries; helpers are files of their own under ``flintc/codegen/device``, and
``kernels/*.py`` hold whole kernels.
"""

from __future__ import annotations

import ast
import re
import textwrap

import pytest
from golden import check_golden
from graphs import OTHER, pipeline

from flintc.codegen.planner import plan
from flintc.ir.build import Weights
from flintc.ir.plan import Kernel
from flintc.passes import BASELINE, PASSES

LAST = list(PASSES)[-1]


def kernels(spec: str, weights: Weights, prefix: str) -> list[Kernel]:
    (graph,) = (s.graph for s in pipeline(spec, weights).steps if s.name == prefix)
    return list(plan(graph).kernels.values())


def entry(kernel: Kernel) -> str:
    """Header, names of the helpers, and the entry's own text."""
    lines = kernel.source.splitlines()
    module = ast.parse(kernel.source)
    header = lines[: module.body[0].end_lineno]
    *helpers, own = (node for node in module.body if isinstance(node, ast.FunctionDef))
    assert own.name == kernel.name
    first = own.decorator_list[0].lineno
    names = "helpers: " + (", ".join(helper.name for helper in helpers) or "none")
    called = [f"# {line}" for line in textwrap.wrap(names, 118)]
    return "\n".join([*header, *called, *lines[first - 1 :]]) + "\n"


@pytest.mark.parametrize(
    ("weights", "prefix"), [("bf16", BASELINE), ("bf16", LAST), ("nvfp4", LAST)], ids=["baseline", "fused", "nvfp4"]
)
def test_golden_entries(weights: Weights, prefix: str) -> None:
    made = sorted(kernels("tiny-flint", weights, prefix), key=lambda k: k.name)
    check_golden(f"kernels/tiny-flint.{prefix}.{weights}.txt", "\n\n".join(entry(k) for k in made))


@pytest.mark.parametrize("prefix", [BASELINE, *PASSES])
@pytest.mark.parametrize(("spec", "weights"), [("flint", "bf16"), ("flint", "nvfp4"), (OTHER, "bf16")])
def test_generated_source_is_fit_to_read(spec: str, weights: Weights, prefix: str) -> None:
    for kernel in kernels(spec, weights, prefix):
        text = kernel.source
        assert max(len(line) for line in text.splitlines()) <= 120, kernel.name
        assert not re.search(r"[ \t]\n|\n{4,}", text), f"{kernel.name}: stray blanks"
        assert "\n\n" not in text[text.index(f"def {kernel.name}") :], f"{kernel.name}: blank lines left by a template"
        assert "{{" not in text and "{%" not in text and text.endswith("\n"), kernel.name
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                assert ast.get_docstring(node), f"{kernel.name}: {node.name} says nothing"


@pytest.mark.parametrize("prefix", [BASELINE, LAST])
def test_a_kernel_holds_the_helpers_it_calls_and_no_other(prefix: str) -> None:
    for kernel in kernels("tiny-flint", "bf16", prefix):
        module = ast.parse(kernel.source)
        defined = [n.name for n in module.body if isinstance(n, ast.FunctionDef)]
        used = {n.id for n in ast.walk(module) if isinstance(n, ast.Name)}
        assert set(defined[:-1]) <= used and len(set(defined)) == len(defined), kernel.name
