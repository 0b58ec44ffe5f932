"""Hub ids, without a network: the local cache in huggingface_hub's own layout, and its public functions replaced."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import flintc
from flintc.errors import CheckpointError
from flintc.runtime.hub import find_checkpoint, find_companion

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
GGUF = EXAMPLE / "tiny-flint.gguf"
FOLDER = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MAIN, OLD = "1" * 40, "2" * 40


class Hub:
    """The local cache of huggingface_hub: repositories of links into their blobs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, repository: str, *names: str, commit: str = MAIN, ref: str = "main") -> None:
        """Put the example's files into a repository: a GGUF under any name, the others by their own."""
        home = self.root / f"models--{repository.replace('/', '--')}"
        for name in names:
            file = home / "snapshots" / commit / name
            blob = home / "blobs" / f"{len(name)}-{name.replace('/', '-')}"
            for folder in (file.parent, blob.parent, (home / "refs" / ref).parent):
                folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(GGUF if name.endswith(".gguf") else EXAMPLE / Path(name).name, blob)
            file.symlink_to(os.path.relpath(blob, file.parent))
        (home / "refs" / ref).write_text(commit)


@pytest.mark.parametrize("find", [find_checkpoint, find_companion])
def test_a_home_of_nobody_is_named(find: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="~no-such-user/x: there is no such user"):
        find("~no-such-user/x")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty cache; offline, and any use of the network fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return Hub(tmp_path / "hub")


def text(path: str, **options: object) -> str | None:
    return flintc.load(path, **options).generate("import os\n", max_tokens=6, seed=1).text  # type: ignore[arg-type]


def test_a_repository_of_safetensors(cache: Hub) -> None:
    cache.add("some/flint", *FOLDER)
    assert text("some/flint") == text(str(EXAMPLE)) == text(f"some/flint@{MAIN}")


def test_a_repository_of_a_single_gguf(cache: Hub) -> None:
    cache.add("some/flint-GGUF", "flint-nvfp4.gguf", "config.json")
    for name in ("some/flint-GGUF", "some/flint-GGUF:flint-nvfp4.gguf", f"some/flint-GGUF@{MAIN}"):
        assert find_checkpoint(name).name == "flint-nvfp4.gguf"
    assert text("some/flint-GGUF") == text(str(GGUF))


def test_a_gguf_is_named_among_others(cache: Hub) -> None:
    cache.add("some/flint", "a.gguf", "nvfp4/b.gguf")
    assert find_checkpoint("some/flint:a.gguf").name == "a.gguf"
    assert text("some/flint:nvfp4/b.gguf") == text(str(GGUF))
    with pytest.raises(CheckpointError, match=r"2 GGUF files: a\.gguf, nvfp4/b\.gguf \(name one, as in some/flint:a"):
        flintc.load("some/flint")


def test_safetensors_come_first_and_the_gguf_by_name(cache: Hub) -> None:
    cache.add("some/flint", *FOLDER, "flint.gguf")
    assert flintc.load("some/flint").loaded.nbytes > 2 * flintc.load("some/flint:flint.gguf").loaded.nbytes


def test_revisions(cache: Hub) -> None:
    cache.add("some/flint", "new.gguf")
    cache.add("some/flint", "old.gguf", commit=OLD, ref="refs/pr/7")
    assert find_checkpoint("some/flint").name == "new.gguf"
    for name in ("some/flint@refs/pr/7", f"some/flint@{OLD}", "some/flint@refs/pr/7:old.gguf"):
        assert find_checkpoint(name).name == "old.gguf"
    with pytest.raises(CheckpointError, match=r"some/flint:new\.gguf: no such file or folder, and the hub"):
        find_checkpoint("some/flint@refs/pr/7:new.gguf")


def test_config_and_tokenizer_of_another_repository(cache: Hub, tmp_path: Path) -> None:
    cache.add("some/flint-GGUF", "flint.gguf")
    cache.add("some/flint", "config.json", "tokenizer.json", "generation_config.json")
    model = flintc.load("some/flint-GGUF", config="some/flint", tokenizer="some/flint@main")
    assert model.defaults == flintc.load(EXAMPLE).defaults
    assert model.generate("import os\n", max_tokens=6, seed=1).text == text(str(GGUF))
    (tmp_path / "own").mkdir()
    shutil.copy(EXAMPLE / "config.json", tmp_path / "own")
    assert find_companion(tmp_path / "own") == tmp_path / "own"
    with pytest.raises(CheckpointError, match=r"is no folder of config\.json"):
        flintc.load("some/flint-GGUF", config="some/flint-GGUF:flint.gguf")


def test_a_config_of_another_model_is_refused_from_the_hub_too(cache: Hub) -> None:
    cache.add("some/flint-GGUF", "flint.gguf")
    cache.add("other/flint", "config.json")
    config = find_companion("other/flint") / "config.json"
    changed = config.read_text().replace('"sliding_window": ', '"sliding_window": 1')
    config.resolve().write_text(changed)
    with pytest.raises(CheckpointError, match=r"config\.json: window is 1\d+, in .*flint\.gguf it is"):
        flintc.load("some/flint-GGUF", config="other/flint")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such", "no/such: no such file or folder, and the hub does not provide it: "),
        ("some/flint@gone", "some/flint: no such file or folder, and the hub"),
        ("some/flint:gone.gguf", "some/flint:gone.gguf: no such file or folder, and the hub"),
        ("some/empty", "some/empty: the repository holds no safetensors and no GGUF file"),
        ("folder/mistyped.gguf", r"folder/mistyped.gguf: no such file or folder \(pass"),
        ("some/flint:../../secret.gguf", "no such file or folder"),
    ],
)
def test_what_is_not_there_is_one_line(name: str, words: str, cache: Hub) -> None:
    cache.add("some/flint", "flint.gguf")
    cache.add("some/empty", "config.json")
    with pytest.raises(CheckpointError, match=words) as caught:
        flintc.load(name)
    assert "\n" not in str(caught.value)


def test_a_folder_of_that_name_comes_first(cache: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.add("some/flint", "flint.gguf")
    (tmp_path / "some" / "flint").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("some/flint") == Path("some/flint")


class Online:
    """A hub that can be reached: its listing, and a note of everything that is fetched into the cache."""

    def __init__(self, cache: Hub, *names: str) -> None:
        self.cache, self.names, self.fetched = cache, names, list[str]()

    def list_repo_files(self, repository: str, *, revision: str | None = None) -> list[str]:
        return list(self.names)

    def hf_hub_download(self, repository: str, name: str, *, revision: str | None = None) -> str:
        self.fetched.append(name)
        self.cache.add(repository, name)
        return str(self.cache.root / f"models--{repository.replace('/', '--')}" / "snapshots" / MAIN / name)

    def snapshot_download(
        self, repository: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        def wanted(name: str) -> bool:
            ignored = any(fnmatch(name, p) for p in ignore_patterns)
            return not ignored and any(fnmatch(name, p) for p in allow_patterns)

        for name in filter(wanted, self.names):
            folder = str(Path(self.hf_hub_download(repository, name)).parent)
        return folder


@pytest.fixture
def online(cache: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Online]:
    def make(*names: str) -> Online:
        hub = Online(cache, *names)
        for function in ("list_repo_files", "hf_hub_download", "snapshot_download"):
            monkeypatch.setattr(huggingface_hub, function, getattr(hub, function))
        return hub

    return make


MORE = ("README.md", "original/model.safetensors", "flint.gguf", "model.bin")


def test_of_a_repository_only_what_loads_is_fetched(online: Callable[..., Online]) -> None:
    hub = online(*FOLDER, *MORE)
    assert (find_checkpoint("some/flint") / "config.json").is_file()
    assert sorted(hub.fetched) == sorted(FOLDER)


def test_of_a_gguf_repository_only_the_gguf_is_fetched(online: Callable[..., Online]) -> None:
    hub = online("README.md", "flint.gguf", "imatrix.dat", "config.json")
    assert find_checkpoint("some/flint").name == "flint.gguf"
    assert hub.fetched == ["flint.gguf"]
    hub = online(*FOLDER, *MORE)
    find_checkpoint("some/other:flint.gguf")
    assert hub.fetched == ["flint.gguf"]


def test_of_a_companion_no_weight_is_fetched(online: Callable[..., Online]) -> None:
    hub = online(*FOLDER, *MORE, "chat_template.jinja")
    find_companion("some/flint@main")
    assert sorted(hub.fetched) == sorted({*FOLDER, "chat_template.jinja"} - {"model.safetensors"})


def test_the_environment_that_asks_to_stay_offline(cache: Hub) -> None:
    """From the command line, with nothing replaced."""
    cache.add("some/flint-GGUF", "flint.gguf")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache.root)}
    argv = [sys.executable, "-m", "flintc", "generate", "--prompt", "import os\n", "--max-tokens", "6", "--seed", "1"]
    for name, code in (("some/flint-GGUF", 0), ("some/absent", 2)):
        done = subprocess.run([*argv, name], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        expected = f"{text(str(GGUF))}\n" if code == 0 else ""
        assert done.stdout == expected
    assert done.stderr.startswith("flintc: error: some/absent: no such file or folder, and the hub")
    assert done.stderr.count("\n") == 1
