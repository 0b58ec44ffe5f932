"""The command line in this process: exit code, standard output and standard error of one command."""

from __future__ import annotations

from pathlib import Path

import pytest
from said import Flintc, Said

from flintc import cli


@pytest.fixture
def flintc(capfd: pytest.CaptureFixture[str]) -> Flintc:
    """Runs a command; output is caught below Python, so that a library's own prints count too."""

    def run(*argv: str | Path) -> Said:
        capfd.readouterr()
        code = cli.run([str(a) for a in argv])
        return Said(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The trained model that comes with the project, as published in BF16; only to be read."""
    return Path(__file__).parents[2] / "examples" / "tiny-flint"
