"""Finding, reading, extending and validating spec files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flintc.errors import CheckpointError, SpecError, UsageError
from flintc.spec.model import KNOWN_PASSES, Spec
from flintc.spec.rules import check_spec
from flintc.spec.source import Document, KeyPath, read_document
from flintc.spec.words import did_you_mean

MAX_EXTENDS = 8


def _shipped_folder() -> Path:
    """Folder of the specs that come with flintc: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "specs"
    return inside if inside.is_dir() else package.parent / "specs"


def shipped_specs() -> dict[str, Path]:
    """Name -> file of every spec that comes with flintc."""
    return {path.stem: path for path in sorted(_shipped_folder().glob("*.yaml"))}


def load_spec(source: str | Path, known_passes: Sequence[str] = KNOWN_PASSES) -> Spec:
    """Read a spec: a path, or the name of a shipped one.

    ``known_passes`` are the passes a pipeline may name, in the order they may come in. SpecError names file, line
    and column of a mistake; UsageError where there is no such file.
    """
    document = _extended(read_document(_find(source)), ())
    spec = _validated(document)
    check_spec(spec, known_passes)
    return spec


def spec_for(architecture: str | None = None, gguf: str | None = None) -> Spec:
    """The shipped spec for a checkpoint's ``architectures`` entry or GGUF ``general.architecture``."""
    for spec in _pickable():
        if architecture in spec.match.architectures or (gguf is not None and gguf == spec.match.gguf):
            return spec
    known = [a for s in _pickable() for a in (*s.match.architectures, s.match.gguf) if a]
    raise CheckpointError(
        f"no spec for architecture {architecture or gguf!r}",
        remedy=did_you_mean(str(architecture or gguf), known) or f"known: {', '.join(known)}",
    )


@cache
def _pickable() -> tuple[Spec, ...]:
    specs = [load_spec(path) for path in shipped_specs().values()]
    return tuple(s for s in specs if not s.match.named_only)


def _find(source: str | Path) -> Path:
    shipped = shipped_specs()
    if isinstance(source, str) and source in shipped:
        return shipped[source]
    path = Path(source)
    if not path.exists():
        near = did_you_mean(path.stem, shipped)
        raise UsageError(f"no spec file {source}", remedy=near or f"shipped specs: {', '.join(shipped)}")
    return path


def _extended(document: Document, seen: tuple[Path, ...]) -> Document:
    """``document`` laid over the spec it extends, if any."""
    if "extends" not in document.data:
        return document
    place = document.place(("extends",))
    name = document.data.pop("extends")
    here = Path(document.file).resolve()
    if len(seen) >= MAX_EXTENDS:
        raise SpecError(f"a chain of more than {MAX_EXTENDS} specs that extend each other", place)
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
        raise SpecError("`extends` takes the name of a file in the same folder, or of a shipped spec", place)
    base = _base(here.parent, name)
    if base is None:
        near = did_you_mean(name, [p.name for p in here.parent.glob("*.yaml")] + list(shipped_specs()))
        raise SpecError(f"no spec {name!r} to extend", place, remedy=near)
    if base.resolve() in (*seen, here):
        raise SpecError("specs extend each other in a circle", place)
    return document.over(_extended(read_document(base), (*seen, here)))


def _base(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.yaml"):
        if path.is_file() and path.resolve().parent == folder:
            return path
    return shipped_specs().get(name.removesuffix(".yaml"))


def _validated(document: Document) -> Spec:
    try:
        spec = Spec.model_validate(document.data)
    except ValidationError as error:
        raise _spec_error(error, document) from None
    spec._document = document
    return spec


def _spec_error(error: ValidationError, document: Document) -> SpecError:
    """The mistake that stands first in the file, in our words."""
    details = error.errors(include_url=False)
    return min((_one_error(d, document) for d in details), key=lambda e: (e.place.line, e.place.column))


#: Our words for pydantic's kinds of errors.
_WORDS = {
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "bool_type": "expected true or false",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "too_short": "expected at least one entry",
}


def _one_error(detail: Any, document: Document) -> SpecError:
    at_key = "[key]" in detail["loc"]
    path: KeyPath = tuple(p for p in detail["loc"] if p != "[key]")
    place = document.key_place(path) if at_key else document.place(path)
    kind, context, given = detail["type"], detail.get("ctx", {}), detail["input"]
    match kind:
        case "unknown_key":
            key_place = document.key_place((*path, context["key"]))
            return SpecError(detail["msg"], key_place, remedy=context["remedy"])
        case "missing":
            return SpecError(f"missing key {str(path[-1])!r}", document.key_place(path[:-1]))
        case "literal_error":
            known = [word.strip(" '") for word in context["expected"].replace(" or ", ",").split(",")]
            message = f"{given!r} is not {'one of ' * (len(known) > 1)}{context['expected']}"
            return SpecError(message, place, remedy=did_you_mean(str(given), known))
        case "string_pattern_mismatch":
            words = "lower-case letters, digits and underscores, a letter first"
            return SpecError(f"{given!r} is not a name: {words}", place)
    message = _WORDS.get(kind, detail["msg"])
    return SpecError(f"{path[-1]}: {message}" if path and kind in _WORDS else message, place)
