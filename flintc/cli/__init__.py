"""The ``flintc`` command: one module per command; this file builds the application and owns errors and exit codes."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer
from typer.exceptions import Abort, TyperException

from flintc.cli import ablate, bench, compile, convert, demo, env, generate, show, synth, tune, verify
from flintc.cli.common import Debug, State, say_error, say_warning
from flintc.errors import FlintcError, FlintcWarning

#: Exit codes of every command: it worked, the work failed, the usage or an input is wrong.
OK, FAILED, BAD_INPUT = 0, 1, 2
#: What Typer returns for Ctrl-C.
_INTERRUPTED = 130


def build_app() -> typer.Typer:
    """The application with every command registered."""
    app = typer.Typer(
        name="flintc",
        help="A declarative kernel-fusion compiler for the Flint language model.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in (compile, show, ablate, generate, verify, synth, convert, env, bench, tune, demo):
        module.register(app)

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and leave."),
        debug: Debug = False,
    ) -> None:
        if version:
            from flintc import __version__

            typer.echo(__version__)
            raise typer.Exit(OK)
        if context.invoked_subcommand is None:
            typer.echo(context.get_help(), nl=False)
            raise typer.Exit(BAD_INPUT)

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    code = run(argv)
    # Python looks through all there is for garbage on its way out, again and again; the system takes it back anyway.
    gc.freeze()
    sys.exit(code)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. An error or a warning is one clear line on stderr."""
    State.debug = False
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if issubclass(category, FlintcWarning):
                say_warning(str(message))
            else:
                show(message, category, *place)

        warnings.showwarning = tell  # type: ignore[assignment]
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = build_app()(args=list(argv) if argv is not None else None, prog_name="flintc", standalone_mode=False)
        if code == _INTERRUPTED:
            return _fail("interrupted", FAILED)
        return code if isinstance(code, int) else OK
    except FlintcError as error:
        return _fail(str(error), error.exit_code)
    except TyperException as error:
        # What a validator says of itself ahead of what is wrong is no news to whoever typed the value.
        message = error.format_message().replace(": Value error, ", ": ")
        # A group without a command has printed its help: its message is empty.
        return _fail(message, BAD_INPUT) if message else BAD_INPUT
    except Abort:
        return _fail("interrupted", FAILED)
    except SystemExit as exit:
        if not isinstance(exit.__context__, BrokenPipeError):
            raise
        # The reader of our output left (`flintc show ... | head`): no mistake, and nobody to write the rest to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", FAILED)
    except Exception as error:
        return _fail(f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)", FAILED)


def _fail(message: str, code: int) -> int:
    if State.debug:
        traceback.print_exc()
    say_error(message)
    return code
