"""Where a checkpoint lies: a path, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from flintc.errors import CheckpointError

#: ``organisation/name``, then ``@`` and a branch, tag or commit where a certain one is meant, then ``:`` and a file.
_HUB_ID = re.compile(
    r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?(:(?P<file>(\w[\w.+ -]*/)*\w[\w.+ -]*\.gguf))?"
)

#: What describes a model and its text, and what holds its weights; other files of a repository stay there.
_TEXT = ["*.json", "*.jinja"]
_FILES = [*_TEXT, "*.safetensors"]
_FOLDERS = ["*/*"]


def find_checkpoint(path: str | Path) -> Path:
    """The file or folder at ``path``, or the local copy of what a hub id names.

    ``org/name`` or ``org/name@revision`` is the safetensors of a repository, or its GGUF file where it has no
    safetensors and one GGUF; ``org/name[@revision]:file.gguf`` is that file. Downloads what the local cache lacks,
    unless huggingface_hub is told to stay offline. CheckpointError where it is neither, or cannot be had.
    """
    found = _local(path)
    if isinstance(found, Path):
        return found  # opening it says what is wrong with a path
    repository, revision, file = found
    return _download(repository, revision, file)


def find_companion(path: str | Path) -> Path:
    """The folder or file at ``path``, or the local copy of what a hub repository says besides its weights.

    For a config or tokenizer from elsewhere; errors as for :func:`find_checkpoint`.
    """
    found = _local(path)
    if isinstance(found, Path):
        return found
    repository, revision, file = found
    if file is not None:
        raise CheckpointError(f"{path}: a GGUF file is no folder of config.json or tokenizer.json")
    return _snapshot(repository, revision, _TEXT)


def _local(path: str | Path) -> Path | tuple[str, str | None, str | None]:
    """A path, or the repository, revision and file of an id."""
    try:
        local = Path(path).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{path}: there is no such user, or no home directory") from None
    match = _HUB_ID.fullmatch(str(path))
    mistyped = local.suffix == ".gguf" and (match is None or match["file"] is None)
    if match is None or mistyped or local.exists():
        return local
    return match["id"], match["revision"], match["file"]


def _download(repository: str, revision: str | None, file: str | None) -> Path:
    if file is not None:
        return _file(repository, revision, file)
    names = _listed(repository, revision)
    if names is None:
        folder = _snapshot(repository, revision, _FILES)
        names = [p.relative_to(folder).as_posix() for p in (*folder.glob("*"), *folder.glob("*/**/*.gguf"))]
    if any(name.endswith(".safetensors") for name in names):
        return _snapshot(repository, revision, _FILES)
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) == 1:
        return _file(repository, revision, found[0])
    at = f"{repository}@{revision}" if revision else repository
    if not found:
        raise CheckpointError(f"{at}: the repository holds no safetensors and no GGUF file", remedy="name another")
    raise CheckpointError(
        f"{at}: the repository holds {len(found)} GGUF files: {', '.join(sorted(found)[:4])}",
        remedy=f"name one, as in {at}:{min(found)}",
    )


def _listed(repository: str, revision: str | None) -> list[str] | None:
    """Names of a repository's files outside folders, GGUF files in folders too; None where nobody can be asked."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(repository, revision=revision)
    except Exception:  # of whatever HTTP client it uses; the local copy, or its absence, is told of later
        return None
    return [name for name in names if "/" not in name or name.endswith(".gguf")]


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=_FOLDERS))
    except (OSError, ValueError) as error:  # the bases of everything it raises
        raise _absent(repository, error) from error


def _file(repository: str, revision: str | None, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except (OSError, ValueError) as error:
        raise _absent(f"{repository}:{file}", error) from error


def _absent(what: str, error: Exception) -> CheckpointError:
    reason = str(error).strip().partition("\n")[0]
    return CheckpointError(
        f"{what}: no such file or folder, and the hub does not provide it: {reason}",
        remedy="pass a folder of safetensors, a .gguf file, or the id of a repository",
    )
