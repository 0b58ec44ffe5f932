"""The text tiny-flint is trained on: CPython 3.11.7's standard library, file by file with its hash.

The list in ``sources.txt`` fixes the text whatever Python is installed. CPython is under the PSF License 2.0.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SOURCES = Path(__file__).with_name("sources.txt")
RELEASE = "CPython 3.11.7"

#: Not prose, not code: tables, generated files, and what is not part of the release.
SKIPPED = ("site-packages", "encodings", "lib2to3", "config-")
#: Tests are half the library; the largest and those about other alphabets are mostly data.
LARGEST_TEST = 200_000
#: One file in so many is held out of training.
HELD_OUT_EVERY = 25
#: Characters of the longest answer of a chat.
LONGEST_ANSWER = 400


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text; ``name`` says where it comes from."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it is for measuring only: decided by its name, so that the split never moves."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0


def select(library: Path) -> list[str]:
    """Paths, relative to ``library`` (the folder Lib of CPython), of the files to train on."""
    chosen = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if relative.parts[0].startswith(SKIPPED) or relative.name.startswith("_sysconfigdata"):
            continue
        content = path.read_bytes()
        if relative.parts[0] == "test" and (len(content) > LARGEST_TEST or not content.isascii()):
            continue
        try:
            compile(content.decode("utf-8"), str(relative), "exec", dont_inherit=True)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # broken on purpose, for a test
        chosen.append(relative.as_posix())
    return chosen


def record(library: Path) -> None:
    """Write ``sources.txt`` anew from ``library``."""
    lines = [f"{hashlib.sha256((library / name).read_bytes()).hexdigest()}  {name}" for name in select(library)]
    SOURCES.write_text("\n".join(lines) + "\n", encoding="utf-8")


def documents(library: Path) -> Iterator[Document]:
    """Every listed file as a document, the manual's topics one by one; SystemExit where a file is another."""
    for line in SOURCES.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        path = library / PurePosixPath(name)
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != digest:
            raise SystemExit(f"{path} is not the file of {RELEASE}: pass the folder Lib of that release")
        text = content.decode("utf-8")
        if name == "pydoc_data/topics.py":
            yield from (Document(f"{name}#{topic}", body) for topic, body in _topics(text).items())
        elif text.strip():
            yield Document(name, text)


def _topics(text: str) -> dict[str, str]:
    """The reference manual as pydoc shows it: topic -> text."""
    (assignment,) = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assignment.value)
    return topics


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer, made from a docstring."""

    question: str
    answer: str


def exchanges(document: Document) -> Iterator[Exchange]:
    """What each documented function and class of a library module does, in the words of its docstring."""
    if not document.name.endswith(".py") or document.name.startswith("test/") or "/test" in document.name:
        return
    module = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name, node in _definitions(ast.parse(document.text), module):
        answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if 20 <= len(answer) <= LONGEST_ANSWER:
            yield Exchange(f"What does {name} do?", answer)


def _definitions(
    tree: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, name)
