"""The small trained checkpoint that comes with flintc."""

from __future__ import annotations

from pathlib import Path

from flintc.errors import CheckpointError

_NAME = "tiny-flint.gguf"


def shipped_checkpoint() -> Path:
    """The trained tiny-flint as one NVFP4 file with its tokenizer; CheckpointError where an installation lacks it.

    It lies inside the installed package, or beside it in a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "examples" / _NAME, package.parent / "examples" / "tiny-flint" / _NAME)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise CheckpointError(f"{places[0]}: no such file", remedy="install flintc again, or from its repository")
    return found
