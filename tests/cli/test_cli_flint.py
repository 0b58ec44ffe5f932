"""The whole of Flint on the command line: counts derived from its spec, and a bundle for two targets with no GPU."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from said import Flintc, Said

SPEC = Path(__file__).parents[2] / "specs" / "flint.yaml"
FULL = {0, 1, *range(5, 46, 4), 48}
DENSE = {0, 1}


# In BF16 the product of qkv streams too many weights to be cut from what follows it.
@pytest.mark.parametrize(("weights", "dense", "moe", "in_all"), [("bf16", 8, 9, 441), ("nvfp4", 9, 10, 490)])
def test_ablate_derives_the_launches_of_flint(flintc: Flintc, weights: str, dense: int, moe: int, in_all: int) -> None:
    steps = json.loads(flintc("ablate", SPEC, "--weights", weights, "--json").out)["steps"]
    first, joined, last = steps[0], steps[-2], steps[-1]
    assert (first["pass"], first["launches_total"]) == ("baseline", 1052)
    assert first["launches_per_layer"] == {
        str(n): 13 if n == 0 else 14 if n in DENSE else 21 if n in FULL else 22 for n in range(49)
    }
    assert (joined["pass"], joined["launches_total"]) == ("dependent-launch", 345)
    assert set(joined["launches_per_layer"].values()) == {7}
    assert (last["pass"], last["launches_total"]) == ("split-arrivals", in_all)
    assert last["launches_per_layer"] == {str(n): dense if n in DENSE else moe for n in range(49)}


@pytest.mark.alone
def test_compile_flint_cold_and_again(
    flintc: Flintc, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a minute on two cores, under two seconds from the cache, and the same bytes from whatever was kept."""
    monkeypatch.setenv("FLINTC_CACHE", str(tmp_path / "cache"))

    def compiled(name: str) -> tuple[float, Said]:
        begin = time.monotonic()
        said = flintc("compile", SPEC, "--target", "sm_90,sm_100", "--json", "-o", tmp_path / name)
        taken = time.monotonic() - begin
        assert (said.code, said.err) == (0, ""), "a kernel spills"
        return taken, said

    cold, said = compiled("cold")
    made = json.loads(said.out)
    assert made["launches"] == 442 and {k["target"] for k in made["kernels"]} == {"sm_90", "sm_100"}
    again, _ = compiled("again")
    shutil.rmtree(tmp_path / "cache" / "bundles")
    compiled("of-kernels")
    assert contents(tmp_path / "cold") == contents(tmp_path / "again") == contents(tmp_path / "of-kernels")
    # Tests that follow find the kernels of the whole model there.
    shutil.copytree(tmp_path / "cache" / "kernels", cache / "kernels", dirs_exist_ok=True)
    assert cold < 60 and again < 2


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
