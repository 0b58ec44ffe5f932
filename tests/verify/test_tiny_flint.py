"""The trained model that ships with the project: what its page says of it, and what generation promises."""

from __future__ import annotations

import json
import math
import re
import sysconfig
from pathlib import Path

import pytest
from safetensors import safe_open

import flintc
from flintc.bench.divergence import losses, mean_perplexity
from flintc.bench.verify import default_text

FOLDER = Path(__file__).parents[2] / "examples" / "tiny-flint"
FORMS = {"bf16": FOLDER, "nvfp4": FOLDER / "tiny-flint.gguf"}
TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
#: Bits per byte that the model must stay under; frequencies of tokens alone need about 2.95.
BOUND = 1.3
PROMPTS = ("def main():\n", "import os\n", "class Parser:\n", "    def test_")


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest) -> flintc.Model:
    return flintc.load(FORMS[request.param], backend="reference", context=1024)


def test_both_forms_fit_twelve_megabytes() -> None:
    files = [FOLDER / "model.safetensors", FORMS["nvfp4"], *(FOLDER / name for name in TEXT_FILES)]
    assert sum(file.stat().st_size for file in files) <= 12e6


def test_names_are_the_published_ones() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"model.layers.7.self_attn.softmax_offset", "model.layers.2.mlp.experts.7.down_proj.weight"} <= names
    assert not any("sinks" in name or name.endswith("gate_up_proj") for name in names)


def test_structure_is_that_of_flint() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert set(config["layer_types"]) == {"full_attention", "sliding_attention"}
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert config["no_rope_layer_indices"] == full and config["mlp_only_layers"] == [0, 1]
    assert config["shared_expert_intermediate_size"] > 0 and config["sliding_window"] < 200


def test_recorded_figures_hold_the_bounds() -> None:
    card = json.loads((FOLDER / "card.json").read_text())
    assert card["held_out_bits_per_byte"] < BOUND < 0.5 * card["unigram_bits_per_byte"]
    assert card["share_of_words_in_sources"] >= 0.8


def test_bits_per_byte_on_text_it_never_saw(model: flintc.Model) -> None:
    """Parts of the held-out files, 500 ids at a time."""
    ids = model.tokenizer.encode(default_text())[:4000]
    prompts = [ids[i : i + 500] for i in range(0, len(ids), 500)]
    bits = math.log2(mean_perplexity([losses(model.forward(p), p) for p in prompts]))
    size = len(model.tokenizer.decode(ids).encode())
    print(f"{bits * len(ids) / size:.3f} bits per byte")
    assert bits * len(ids) / size < BOUND


def test_generated_words_are_words(model: flintc.Model) -> None:
    """Four of five words occur in the standard library of the Python that runs this."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [f for f in library.rglob("*.py") if "site-packages" not in f.parts]
    known = {w for f in files for w in words(f.read_text(encoding="utf-8", errors="replace"))}
    made = model.generate_batch(list(PROMPTS), max_tokens=100, seed=0)
    said = [w for g in made for w in words(re.sub(r"\w+$", "", g.text or ""))]
    print(f"{sum(w in known for w in said)} of {len(said)} words")
    assert len(said) > 80 and sum(w in known for w in said) >= 0.8 * len(said)


def words(text: str) -> list[str]:
    return re.findall(r"\b[A-Za-z]\w*", text)


def test_text_does_not_depend_on_the_batch(model: flintc.Model) -> None:
    """Alone, again, and at any place of batches within and above the fast path's eight rows."""
    alone = [model.generate(p, max_tokens=12, seed=3).token_ids for p in PROMPTS[:2]]
    assert model.generate(PROMPTS[0], max_tokens=12, seed=3).token_ids == alone[0]
    for others in (1, 8):
        batch = [PROMPTS[0], *["x = [1, 2]\n"] * others, PROMPTS[1]]
        made = model.generate_batch(batch, max_tokens=12, seed=3)
        assert [made[0].token_ids, made[-1].token_ids] == alone


def test_answers_a_question_and_stops(model: flintc.Model) -> None:
    made = model.chat([{"role": "user", "content": "What does textwrap.dedent do?"}], max_tokens=200, temperature=0.0)
    assert made.finish_reason == "stop" and made.text and made.text.startswith("</think>")


def test_padded_ids_are_never_sampled(model: flintc.Model) -> None:
    assert model.sampled_vocab is not None and model.sampled_vocab < model.vocab
    made = model.generate(PROMPTS[0], max_tokens=40, temperature=50.0, top_k=0, top_p=1.0, seed=0, stop_ids=())
    assert max(made.token_ids) < model.sampled_vocab
