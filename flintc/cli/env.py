"""``flintc env``: what this machine and installation offer."""

from __future__ import annotations

import typer
from rich.table import Table

from flintc.cli.common import Debug, Json, emit, stdout


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("env")(env_command)


def env_command(as_json: Json = False, debug: Debug = False) -> None:
    """Versions, devices, backends and caches, for bug reports."""
    from flintc.bench.env import facts

    data = facts()

    def show() -> None:
        table = Table(show_header=False, box=None)
        for key, value in data.items():
            table.add_row(key, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        stdout.print(table)

    emit(as_json, data, show)
