"""The rooms of docs/architecture.md: who may import whom, and how large a file may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flintc"
LONGEST = 520  # lines: "about 500"
FILES = sorted(PACKAGE.rglob("*.py"))
#: Files of the package's own folder that are rooms, or the doors to them.
SINGLE = {"errors.py", "garbage.py", "unfinished.py", "building.py", "api.py", "__init__.py", "__main__.py"}


@cache
def rooms() -> dict[str, frozenset[str]]:
    """The table in docs/architecture.md: room -> rooms that it may import."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)/?` \|[^|]+\| ([^|]+) \|$", text, re.M)
    table = {name.removesuffix(".py"): allowed for name, allowed in rows}
    known = frozenset(table) | {"api"}
    return {room: _allowed(allowed, known) for room, allowed in table.items()}


def _allowed(cell: str, known: frozenset[str]) -> frozenset[str]:
    if cell == "-":
        return frozenset()
    if cell.startswith("everything"):
        return known - frozenset(re.findall(r"but (\w+)", cell))
    return frozenset(cell.split(", "))


def imports(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module of this package that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            # `from flintc import api` names a module as much as `import flintc.api` does.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "flintc")


def room_of(file: Path) -> str:
    inside = file.relative_to(PACKAGE)
    return inside.stem if len(inside.parts) == 1 else inside.parts[0]


def _room_of_import(name: str) -> str:
    top = name.split(".")[1]
    return top if top in rooms() else "api"  # what the package itself offers is the facade's


def wrong_imports(source: str, file: Path) -> list[str]:
    room = room_of(file)
    allowed = rooms()[room] | {room}
    return [
        f"{file.relative_to(ROOT)}:{line}: {room} imports {name}"
        for line, name in sorted(imports(ast.parse(source), file))
        if _room_of_import(name) not in allowed
    ]


def test_the_table_names_every_room_and_no_other() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert rooms().keys() == folders | {"errors", "garbage", "unfinished", "building"}
    assert {p.name for p in PACKAGE.glob("*.py")} == SINGLE
    for room, allowed in rooms().items():
        assert allowed <= rooms().keys() | {"api"}, room


def test_rooms_are_in_order() -> None:
    """No room imports one further down in the table, so that no two import each other."""
    order = list(rooms())
    for room, allowed in rooms().items():
        if room not in ("bench", "cli"):
            assert all(order.index(other) < order.index(room) for other in allowed), room
    assert "cli" not in rooms()["bench"]


@pytest.mark.parametrize("room", sorted(rooms()))
def test_imports_point_downwards(room: str) -> None:
    wrong = [w for file in FILES if room_of(file) == room for w in wrong_imports(file.read_text(), file)]
    assert wrong == []


def test_a_wrong_import_is_seen_wherever_it_stands() -> None:
    source = (
        "def f():\n    from flintc.codegen import planner\nimport flintc.cli.show\nfrom flintc import api\nimport re\n"
    )
    places = [w.split(": ", 1) for w in wrong_imports(source, PACKAGE / "ir" / "new.py")]
    assert places == [
        ["flintc/ir/new.py:2", "ir imports flintc.codegen.planner"],
        ["flintc/ir/new.py:3", "ir imports flintc.cli.show"],
        ["flintc/ir/new.py:4", "ir imports flintc.api"],
    ]
    assert wrong_imports(source, PACKAGE / "cli" / "new.py") == []


def test_the_errors_import_nothing_and_the_package_only_its_facade() -> None:
    assert list(imports(ast.parse((PACKAGE / "errors.py").read_text()), PACKAGE)) == []
    tops = {name.split(".")[1] for _, name in imports(ast.parse((PACKAGE / "__init__.py").read_text()), PACKAGE)}
    assert tops == {"api", "errors", "bundle", "runtime"}


def test_importing_the_package_imports_no_heavy_library() -> None:
    """`flintc --help` and error messages must not wait for torch."""
    program = "import sys, flintc, flintc.cli; print(sorted({'torch', 'triton', 'networkx'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("folder", ["flintc", "tests", "examples"])
def test_no_file_is_too_long_to_read(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".j2")]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > LONGEST}
    assert long == {}


def test_no_file_names_a_place_on_a_machine() -> None:
    """What works only where it was written: absolute paths of somebody's disk."""
    text = re.compile(r"(?<![\w./])/(?:home|root|work|Users|opt|mnt)/\w")
    suffixes = {".py", ".j2", ".md", ".yaml", ".toml", ".json", ".txt"}
    found = [
        f"{p.relative_to(ROOT)}:{number}"
        for folder in ("flintc", "specs", "docs", "examples", "tests", ".ci")
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and (p.suffix in suffixes or folder == ".ci") and p != Path(__file__)
        for number, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
        if text.search(line)
    ]
    assert found == []
