"""Where a checkpoint lies: a path, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from flintc.errors import CheckpointError

#: ``organisation/name``, with ``@`` and a branch, tag or commit where a certain one is meant.
_HUB_ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w./-]+))?")

#: What a checkpoint consists of; other files of a repository stay there.
_FILES = ["*.json", "*.jinja", "*.safetensors"]


def find_checkpoint(path: str | Path) -> Path:
    """The file or folder at ``path``, or the local copy of a hub repository ``org/name`` or ``org/name@revision``.

    Downloads what the local cache lacks, unless huggingface_hub is told to stay offline. CheckpointError where it
    is neither, or cannot be had.
    """
    local = Path(path).expanduser()
    match = _HUB_ID.fullmatch(str(path))
    if local.exists() or not match:
        return local  # opening it says what is wrong with a path
    return _download(match["id"], match["revision"])


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # the bases of everything it raises
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{repository}: no such file or folder, and the hub does not provide it: {reason}",
            remedy="pass a folder of safetensors, a .gguf file, or the id of a repository",
        ) from error
