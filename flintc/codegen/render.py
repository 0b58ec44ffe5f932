"""From a selection to the text of a self-contained kernel file."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import jinja2

from flintc.codegen.selection import Selection
from flintc.ir.graph import Dependent, Graph, Launch
from flintc.ir.ops import OPS

_PACKAGE = resources.files("flintc.codegen")


@dataclass(frozen=True, slots=True)
class Helper:
    """A device function or constant: its source text and the names it uses."""

    source: str
    uses: frozenset[str]


@cache
def helpers() -> Mapping[str, Helper]:
    """Every function and constant of ``flintc/codegen/device``, by name."""
    found: dict[str, Helper] = {}
    for file in sorted(_PACKAGE.joinpath("device").iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".py") or file.name == "__init__.py":
            continue
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                first = min(d.lineno for d in node.decorator_list)
                name = node.name
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first, name = node.lineno, node.target.id
            else:
                continue
            assert name not in found, f"two device helpers are called {name}"
            found[name] = Helper("\n".join(lines[first - 1 : node.end_lineno]), _names(node))
    return found


def _names(tree: ast.AST) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))


def _closure(used: frozenset[str]) -> list[str]:
    """Helpers reachable from ``used``, each after those it uses."""
    known, order = helpers(), dict[str, None]()

    def visit(name: str) -> None:
        if name in known and name not in order:
            for inner in sorted(known[name].uses - {name}):
                visit(inner)
            order[name] = None

    for name in sorted(used):
        visit(name)
    constants_first = sorted(order, key=lambda name: known[name].source.startswith("@"))
    return constants_first


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("flintc.codegen", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(graph: Graph, launch: Launch, selection: Selection, entry: str) -> str:
    """Source of the kernel file of a launch: header, the helpers it uses, the entry."""
    return render_kernel(selection, entry, _rounding(graph, launch), launch.dependent)


def render_kernel(
    selection: Selection, entry: str, notes: Sequence[str] = (), dependent: Dependent | None = None
) -> str:
    """Source of a kernel file; ``notes`` are lines of its header."""
    body = _environment().get_template(selection.template).render(
        entry=entry,
        doc=selection.doc,
        params=selection.params,
        constants=tuple(selection.constants),
        waits=dependent is not None,
        trigger=dependent.trigger if dependent is not None else "",
        **selection.blocks,
    )  # fmt: skip
    body = re.sub(r"\n{2,}(?= )", "\n", body).strip()
    used = _names(ast.parse(body))
    parts = [_header(selection, notes) + "\n\nimport triton\nimport triton.language as tl"]
    known = helpers()
    parts += [known[name].source for name in _closure(used)]
    return "\n\n\n".join([*parts, body]) + "\n"


def _rounding(graph: Graph, launch: Launch) -> list[str]:
    """What the kernel computes, op by op with its rounding."""
    ops = [graph.ops[name].kind for name in launch.ops]
    lines = (_wrap(f"  {kind}: {OPS[kind].rounding}", "    ") for kind in ops)
    return ["Ops:", *(line for wrapped in lines for line in wrapped), ""]


def _wrap(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _header(selection: Selection, notes: Sequence[str]) -> str:
    """What the kernel is, and the constants it is bound to."""
    bound = "Bound: " + ", ".join(f"{k}={v}" for k, v in selection.constants.items())
    return '"""' + "\n".join([selection.doc, "", *notes, *_wrap(bound, "  ")]) + '\n"""'
