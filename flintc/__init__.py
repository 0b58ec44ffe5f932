"""flintc: a declarative kernel-fusion compiler for the Flint language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flintc.api import compile, load
from flintc.errors import FlintcError

if TYPE_CHECKING:
    from flintc.bundle import Bundle
    from flintc.runtime.model import Model

    __version__: str

__all__ = ["Bundle", "FlintcError", "Model", "__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    # Everything that would slow down `import flintc` is looked up when it is asked for.
    if name == "__version__":
        from importlib.metadata import version

        return version("flintc")
    if name == "Model":
        from flintc.runtime.model import Model

        return Model
    if name == "Bundle":
        from flintc.bundle import Bundle

        return Bundle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
