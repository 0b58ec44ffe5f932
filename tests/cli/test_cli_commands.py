"""What single commands print and write."""

from __future__ import annotations

import json
import re
import tomllib
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from said import Flintc

import flintc as package
from flintc.checkpoint.shipped import shipped_checkpoint
from flintc.cli import demo
from flintc.ir.serialize import graph_from_json
from flintc.passes import PASSES

ROOT = Path(__file__).parents[2]
KERNEL_FACTS = {"name", "target", "registers", "shared_bytes", "spill_stores", "spill_loads", "num_warps"}


@pytest.mark.parametrize("after", ["baseline", *PASSES])
def test_show_after_every_pass(after: str, flintc: Flintc) -> None:
    said = flintc("show", "tiny-flint", "--after", after, "--layer", "2")
    assert said.code == 0
    launches = {"baseline": 22, "residual-norm": 20, "norm-rope-cache": 16, "attention-merge": 15,
                "router-expert-gemv": 10, "combine-gemv": 7, "dependent-launch": 7,
                "split-arrivals": 10}[after]  # fmt: skip
    assert f"layer 2: {launches} launches" in said.out


def test_show_in_every_format(flintc: Flintc) -> None:
    joined = flintc("show", "tiny-flint", "--after", "dependent-launch").out
    assert "graph tiny-flint: 44 launches and 1 launch of the head" in joined
    assert "graph tiny-flint: 60 launches and 1 launch of the head" in flintc("show", "tiny-flint").out
    graph = graph_from_json(json.loads(flintc("show", "tiny-flint", "--format", "json").out))
    assert len(graph.body) == 60
    dot = flintc("show", "tiny-flint", "--format", "dot").out
    assert dot.startswith("digraph") and dot.count("{") == dot.count("}")
    svg = flintc("show", "tiny-flint", "--format", "svg", "--layer", "2")
    assert svg.code == 0 and xml.fromstring(svg.out).tag.endswith("svg")


def test_ablate_report_is_self_contained(flintc: Flintc, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.html"
    said = flintc("ablate", "tiny-flint", "--report", report)
    assert said.code == 0 and said.out.endswith(f"report -> {report}\n")
    html = report.read_text()
    assert "<svg" in html and "combine-gemv" in html
    assert set(re.findall(r"(?:src|href|data)=\"(.{5})", html)) == {"data:"}
    assert not re.search(r"@import|url\(|<script|<link|https?://", html)
    assert list(report.parent.iterdir()) == [report]


def test_ablate_counts_for_a_context_the_model_has(flintc: Flintc) -> None:
    for spec, context in (("tiny-flint", 512), ("flint", 100_000)):
        assert json.loads(flintc("ablate", spec, "--json").out)["context"] == context


def test_the_sizes_and_the_weight_format_of_a_checkpoint(flintc: Flintc, checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "tiny-flint.gguf"
    for path, weights, weight in ((checkpoint, "bf16", "bf16[384, 192]"), (file, "nvfp4", "nvfp4[384, 192]")):
        assert weight in flintc("show", "flint", "--for", path, "--layer", "7").out
        found = json.loads(flintc("ablate", "flint", "--for", path, "--json").out)
        assert (found["spec"], found["weights"], found["context"]) == ("flint", weights, 2048)
        assert len(found["steps"][-1]["launches_per_layer"]) == 8
        assert [step["launches_total"] for step in found["steps"][-2:]] == [58, 80]
    assert json.loads(flintc("ablate", "flint", "--for", file, "--weights", "bf16", "--json").out)["weights"] == "bf16"
    made = json.loads(flintc("compile", "flint", "--for", file, "-o", tmp_path / "bundle", "--json").out)
    assert (made["spec"], made["weights"], made["launches"]) == ("flint", "nvfp4", 81)
    argv = ("generate", file, "--prompt", "import", "--max-tokens", "2", "--temperature", "0", "--json")
    assert flintc(*argv, "--bundle", tmp_path / "bundle").out == flintc(*argv).out


def test_ablate_sets_the_published_counts_beside_ours(flintc: Flintc, checkpoint: Path) -> None:
    text = flintc("ablate", "flint").out
    assert "1,052 -> 345; published: 1,096 -> 346" in text
    assert "\nsplit-arrivals adds 96 launches to save time: 441\n" in text
    packed = flintc("ablate", "flint", "--weights", "nvfp4").out
    assert "1,052 -> 345; published: 1,096 -> 346" in packed
    assert "\nsplit-arrivals adds 145 launches to save time: 490\n" in packed
    joined = flintc("ablate", "flint", "--disable-pass", "split-arrivals").out
    assert "1,052 -> 345; published: 1,096 -> 346" in joined and "adds" not in joined
    assert "\N{HORIZONTAL ELLIPSIS}" not in text, "a cell is cut at 80 columns"
    assert "published" not in flintc("ablate", "tiny-flint").out
    assert "published" not in flintc("ablate", "flint", "--for", checkpoint).out


def test_compile_reports_each_kernel_of_each_target(flintc: Flintc, tmp_path: Path) -> None:
    argv = ("compile", "tiny-flint", "--target", "sm_90, sm_100", "-o", tmp_path / "bundle")
    made = json.loads(flintc(*argv, "--json").out)
    assert made["launches"] == 61
    assert {k["target"] for k in made["kernels"]} == set(made["targets"]) == {"sm_90", "sm_100"}
    assert all(k.keys() >= KERNEL_FACTS for k in made["kernels"])
    said = flintc(*argv)
    spilling = [k for k in made["kernels"] if k["spill_stores"] + k["spill_loads"]]
    assert said.err.count("spills registers") == len(spilling)
    assert said.out.endswith(f"61 launches, {len(made['kernels']) // 2} kernels -> {tmp_path / 'bundle'}\n")
    for kernel in made["kernels"]:
        assert re.search(rf"^ {kernel['name']} +{kernel['target']} +[1-9]", said.out, re.M), "used by something"


def test_compile_into_the_cache_by_default(flintc: Flintc, cache: Path) -> None:
    made = json.loads(flintc("compile", "tiny-flint", "--json").out)
    assert Path(made["bundle"]).is_relative_to(cache)
    assert json.loads(flintc("compile", "tiny-flint", "--json").out) == made


@pytest.mark.parametrize(
    ("left_out", "launches"), [("combine-gemv", 75), ("dependent-launch", 45), ("split-arrivals", 45)]
)
def test_compile_leaves_out_a_pass(flintc: Flintc, tmp_path: Path, left_out: str, launches: int) -> None:
    argv = ("compile", "tiny-flint", "--disable-pass", left_out, "-o", tmp_path / "bundle", "--json")
    made = json.loads(flintc(*argv).out)
    assert made["launches"] == launches
    assert left_out not in made["pipeline"] and len(made["pipeline"]) == len(PASSES) - 1


def test_generate_says_what_the_contract_names(flintc: Flintc, checkpoint: Path) -> None:
    argv = ("generate", checkpoint, "--prompt", "import os", "--max-tokens", "3", "--seed", "4", "--json")
    made = json.loads(flintc(*argv).out)
    assert made.keys() >= {"text", "token_ids", "prompt_tokens", "finish_reason", "path"}
    assert (made["prompt_tokens"], made["path"], made["seed"]) == (2, "reference", 4)
    assert len(made["token_ids"]) <= 3 and made["finish_reason"] in ("stop", "length")
    assert json.loads(flintc(*argv).out) == made
    model = package.load(checkpoint)
    assert list(model.generate("import os", max_tokens=3, seed=4).token_ids) == made["token_ids"]
    assert flintc(*argv[:-1]).out == made["text"] + "\n"


def test_generate_with_a_bundle(flintc: Flintc, checkpoint: Path, tmp_path: Path) -> None:
    bundle, own = tmp_path / "bundle", tmp_path / "checkpoint"
    assert flintc("compile", "tiny-flint", "-o", bundle).code == 0
    assert flintc("synth", "--spec", "tiny-flint", "-o", own, "--demo-tokenizer").code == 0
    argv = ("--prompt", "abc", "--max-tokens", "3", "--temperature", "0", "--json")
    made = json.loads(flintc("generate", own, "--bundle", bundle, *argv).out)
    assert made["token_ids"] == json.loads(flintc("generate", own, *argv).out)["token_ids"]
    said = flintc("generate", checkpoint, "--bundle", bundle, *argv)
    assert said.code == 2 and "is for another model than the checkpoint" in said.err


def test_generate_takes_the_likeliest_token_at_temperature_0(flintc: Flintc, checkpoint: Path) -> None:
    argv = ("generate", checkpoint, "--prompt", "abc", "--max-tokens", "4", "--temperature", "0", "--json")
    made = json.loads(flintc(*argv).out)
    model = package.load(checkpoint)
    ids = model.tokenizer.encode("abc")
    for token in made["token_ids"]:
        assert token == model.forward(ids)[-1, : model.sampled_vocab].argmax().item()
        ids = [*ids, token]


def test_chat_goes_through_the_template_and_a_prompt_does_not(flintc: Flintc, checkpoint: Path) -> None:
    def prompt_tokens(option: str) -> int:
        said = flintc("generate", checkpoint, option, "hi", "--max-tokens", "1", "--json")
        return int(json.loads(said.out)["prompt_tokens"])

    assert prompt_tokens("--prompt") == 2
    assert prompt_tokens("--chat") > 2


def test_synth_and_convert_make_checkpoints_that_generate(flintc: Flintc, checkpoint: Path, tmp_path: Path) -> None:
    sizes = ("--set", "layers=2", "--set", "experts=4", "--set", "vocab=2048")
    assert flintc("synth", "--spec", "tiny-flint", "--format", "gguf", "-o", tmp_path / "a.gguf", *sizes).code == 0
    assert flintc("convert", checkpoint, "--format", "gguf", "-o", tmp_path / "b.gguf").code == 0
    for name in ("a.gguf", "b.gguf"):
        argv = ("generate", tmp_path / name, "--tokenizer", checkpoint, "--prompt", "hi", "--max-tokens", "1")
        assert json.loads(flintc(*argv, "--json").out)["prompt_tokens"] == 2


def test_demo(flintc: Flintc) -> None:
    said = flintc("demo", "--max-tokens", "1")
    assert said.code == 0, said.err
    assert [line[0] for line in said.out.splitlines() if re.match(r"\d\. ", line)] == list("12345")
    (errors,) = (line for line in said.out.splitlines() if "the first 1 tokens are the same" in line)
    kernels, torch = map(float, re.findall(r"\d\.\de-\d+", errors))
    assert 0 < kernels < 3 * torch
    shown = [line.removeprefix("   |")[1:] for line in said.out.splitlines() if line.startswith("   |")]
    assert shown[0].startswith("import ") and shown[1].startswith(shown[0]), "torch goes on where the kernels stopped"
    made = package.load(shipped_checkpoint()).generate(demo.SAMPLED, max_tokens=demo.SAMPLED_TOKENS, seed=demo.SEED)
    sampled = f"{demo.SAMPLED}{made.text}".split("\n")
    assert shown[-len(sampled) :] == [line.rstrip() for line in sampled]


def test_demo_fails_where_kernels_and_torch_disagree(flintc: Flintc, monkeypatch: pytest.MonkeyPatch) -> None:
    other = package.load(shipped_checkpoint()).generate("class", max_tokens=3, temperature=0.0)
    monkeypatch.setattr(demo, "_interpret", lambda *args: other)
    said = flintc("demo", "--json")
    assert said.code == 1 and "other tokens than torch" in said.err
    assert json.loads(said.out)["kernels"]["token_ids"] == list(other.token_ids)


def test_the_shipped_checkpoint_travels_in_a_wheel() -> None:
    """The file that a checkout finds is the one that the wheel puts where an installation looks first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert wheel[str(shipped_checkpoint().relative_to(ROOT))] == "flintc/examples/tiny-flint.gguf"
