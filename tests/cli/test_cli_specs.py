"""Bad specs on the command line: exit 2, and one line of the form ``file:line:column: what is wrong``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from said import Flintc

GOOD = (Path(__file__).parents[1] / "data" / "other.yaml").read_text()
BOMB = "\n".join([
    "a0: &a0 [x, x, x, x, x, x, x, x, x]",
    *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)),
])  # fmt: skip


def but(old: str, new: str) -> str:
    """The good spec with one thing changed."""
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


#: What is wrong, the text, and what is said of it.
SPECS: dict[str, tuple[str | bytes, str]] = {
    "unknown key": (but("numerics:", "numeric:"), "unknown key 'numeric' (did you mean 'numerics'?)"),
    "duplicate key": (but("name: other\n", "name: other\nname: again\n"), "duplicate key 'name'"),
    "unknown op": (but("op: combine", "op: combime"), "unknown op 'combime' (did you mean 'combine'?)"),
    "wrong shape": (but("weight: close, out", "weight: open, out"), "its rows hold 96 values, the input 80"),
    "undefined value": (but("[parts, share]", "[parts, shore]"), "undefined value 'shore' (did you mean 'share'?)"),
    "cycle": (but("head: {value: 16, config: head}", "head: half * 2\n  half: head / 2"), "head -> half -> head"),
    "unknown pass": (
        but("- combine-gemv", "- combine-gem"),
        "unknown pass 'combine-gem' (did you mean 'combine-gemv'?)",
    ),
    "does not divide": (but("queries: {default: 6,", "queries: {default: 7,"), "7 query heads are not a multiple of 3"),
    "negative window": (but("reach: {default: 10,", "reach: {default: -10,"), "reach must be a positive whole number"),
    "alias bomb": (BOMB, "aliases expand"),
    "empty": ("", "empty"),
    "not YAML": ("a: [1, 2\nb: }", ""),
    "binary": (bytes(range(256)) * 4, ""),
}


@pytest.mark.parametrize("case", SPECS)
def test_bad_spec(case: str, flintc: Flintc, tmp_path: Path) -> None:
    text, words = SPECS[case]
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for argv in (
        ("show",),
        ("ablate",),
        ("compile", "-o", tmp_path / "out"),
        ("synth", "-o", tmp_path / "out", "--spec"),
    ):
        said = flintc(*argv, path)
        assert (said.code, said.out) == (2, "")
        assert re.fullmatch(rf"flintc: error: {re.escape(str(path))}:\d+:\d+: .+\n", said.err)
        assert words in said.err
    assert list(tmp_path.iterdir()) == [path]
