"""Every mistake a user can make is one exception class with a greppable name and an exit code."""

from __future__ import annotations

from dataclasses import dataclass


class FlintcError(Exception):
    """Base of all errors flintc reports on purpose: one clear line, no traceback.

    ``exit_code`` follows the command-line contract: 1 the work failed, 2 bad usage or input.
    ``remedy`` says what the user can do about it and is printed after the message.
    """

    exit_code = 2

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class SpecError(FlintcError):
    """A spec file is wrong at a known place."""

    def __init__(self, message: str, place: Place, *, remedy: str | None = None) -> None:
        super().__init__(f"{place}: {message}", remedy=remedy)
        self.place = place


class UsageError(FlintcError):
    """A flag, argument or API parameter is wrong."""


class PassError(FlintcError):
    """A pipeline names an unknown pass, or a pass is asked to run without one it needs."""


class CheckpointError(FlintcError):
    """A checkpoint file is missing, damaged, unsupported, or contradicts the spec."""


class TokenizerError(FlintcError):
    """A checkpoint has no usable tokenizer or chat template for a call that needs text."""


class BundleError(FlintcError):
    """A bundle is damaged, of a foreign schema, or was built for something else."""


class BackendError(FlintcError):
    """The requested backend cannot run on this machine."""


class CapacityError(FlintcError):
    """A request asks for more context, memory or rows than the model was loaded for."""

    exit_code = 1


class CompileError(FlintcError):
    """A generated kernel did not compile; a defect of flintc or of its compiler."""

    exit_code = 1


class MeasurementError(FlintcError):
    """A measurement in a process of its own failed, ended without a result, or took longer than it may."""

    exit_code = 1


class VerificationError(FlintcError):
    """A graph, plan or kernel breaks an invariant that flintc itself must keep."""

    exit_code = 1


class FlintcWarning(UserWarning):
    """Something that was done as asked, but may not be what was wanted."""
