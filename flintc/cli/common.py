"""What every command shares: ``--json``, ``--debug``, progress bars, output."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flintc.errors import UsageError


class State:
    """Process-wide switches set by flags."""

    debug = False


class BackendName(StrEnum):
    """What runs the plan."""

    cuda = "cuda"
    interpret = "interpret"
    reference = "reference"


def _set_debug(value: bool) -> bool:
    State.debug = State.debug or value
    return value


Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_set_debug, is_eager=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Weights = Annotated[str, typer.Option("--weights", help="Weight format: bf16 or nvfp4.")]
WeightsOrOwn = Annotated[
    str | None, typer.Option("--weights", help="Weight format: bf16 or nvfp4 (default: that of --for, else bf16).")
]
For = Annotated[
    str | None,
    typer.Option("--for", metavar="CHECKPOINT", help="Take the sizes of this checkpoint, not SPEC's defaults."),
]
Disabled = Annotated[
    list[str] | None, typer.Option("--disable-pass", metavar="PASS", help="Leave out a fusion pass; may be repeated.")
]
BundleFolder = Annotated[
    Path | None, typer.Option("--bundle", help="Bundle folder (default: compiled on first use, cached).")
]
Context = Annotated[int, typer.Option(min=1, help="Tokens that each sequence holds.")]
Batch = Annotated[int, typer.Option(min=1, max=8, help="Sequences decoded together.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write a Chrome trace of one step.")]
SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a shipped one (flint, tiny-flint).")
]

stdout = Console()
stderr = Console(stderr=True)


def emit(as_json: bool, data: Mapping[str, Any], show: Callable[[], None]) -> None:
    """Print ``data`` as the one JSON object, or ``show`` it to a person. JSON has null for what is no finite number."""
    if as_json:
        sys.stdout.write(json.dumps(_finite(data), ensure_ascii=False, allow_nan=False) + "\n")
    else:
        show()


def _finite(data: Any) -> Any:
    """``data`` with None in place of infinities and NaN."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def say(text: str) -> None:
    """One line on stdout, as it is: no markup, no wrapping."""
    stdout.print(text, markup=False, highlight=False, soft_wrap=True)


def say_error(message: str) -> None:
    """One line on stderr."""
    line = " ".join(message.split("\n")) if not State.debug else message
    sys.stderr.write(f"flintc: error: {line}\n")


def say_warning(message: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"flintc: warning: {message}\n")


def check_folder(file: Path | None) -> None:
    """UsageError where ``file`` has no folder to be written into: told before the work, not after it."""
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.parent}")


def split_list(text: str) -> tuple[str, ...]:
    """``a,b`` -> ("a", "b"); blanks around items are dropped."""
    return tuple(item for item in (part.strip() for part in text.split(",")) if item)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, off when that is no terminal; call it with (done, total, what is being done)."""
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield update
