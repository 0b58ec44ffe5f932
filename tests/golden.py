"""Golden files: text that a test expects to the letter, kept under ``tests/golden/``.

``FLINTC_ACCEPT=1 pytest ...`` rewrites every golden file that the run checks; read the diff before committing it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def check_golden(path: str | Path, text: str) -> None:
    """Fail with a diff unless the golden file ``path`` (relative to ``tests/golden/``) holds ``text``."""
    file = GOLDEN / path
    if os.environ.get("FLINTC_ACCEPT") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        return
    if not file.exists():
        pytest.fail(f"no golden file {file}; FLINTC_ACCEPT=1 writes it", pytrace=False)
    expected = file.read_text(encoding="utf-8")
    if text != expected:
        diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "got", lineterm="")
        pytest.fail(f"{file} differs; FLINTC_ACCEPT=1 accepts the new text\n" + "\n".join(diff), pytrace=False)
