"""Step 3 of 3: the trained model in both published forms, and what it can do.

    python examples/tiny-flint/export.py --library .../lib/python3.11 --trained DIR

Writes beside this file: config.json, model.safetensors (BF16), the tokenizer's files, tiny-flint.gguf (NVFP4), and
``card.json``: bits per byte on the held-out files, and the share of generated words that occur in the sources.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from corpus import documents
from tokenizers import Tokenizer
from transformers import FlintForCausalLM

from flintc.checkpoint import open_checkpoint
from flintc.checkpoint.config_json import published_config
from flintc.checkpoint.convert import convert
from flintc.runtime.demo_tokenizer import CHAT_TEMPLATE, END
from flintc.spec import load_spec

HERE = Path(__file__).parent
GGUF = "tiny-flint.gguf"
#: What the samples begin with, and how many ids each goes on for.
PROMPTS = ("def main():\n", "import os\n", "class Parser:\n", '"""Tests for the ', "    def test_", "for name in ")
SAMPLES, SAMPLE_IDS = 4, 200
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}


def write_checkpoint(trained: Path, tokenizer: Path, out: Path) -> None:
    """The folder of safetensors, then the GGUF file made from it."""
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(trained / name, out / name)
    model = open_checkpoint(out).bind(load_spec("flint"))
    _write_json(out / "config.json", published_config(model))
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(out / "tokenizer_config.json", {"eos_token": END, "pad_token": END})
    ids = Tokenizer.from_file(str(tokenizer)).get_vocab()
    stops = [ids[text] for text in (END, "<|user|>", "<|observation|>")]
    _write_json(
        out / "generation_config.json", {"eos_token_id": stops, "pad_token_id": stops[0], "do_sample": True, **SAMPLING}
    )
    (out / GGUF).unlink(missing_ok=True)
    convert(out, out / GGUF, "gguf")


def words(text: str) -> list[str]:
    """Words and identifiers, whole: runs of letters, digits and underscores that begin with a letter."""
    return re.findall(r"\b[A-Za-z]\w*", text)


def sample(model: FlintForCausalLM, tokenizer: Tokenizer, allowed: int) -> Iterable[str]:
    """Texts that the model goes on with after each prompt, without their last, unfinished word."""
    torch.manual_seed(0)
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids] * SAMPLES)
        made = model.generate(
            ids, do_sample=True, max_new_tokens=SAMPLE_IDS, min_new_tokens=SAMPLE_IDS, pad_token_id=0,
            suppress_tokens=[*range(allowed, model.config.vocab_size)], **SAMPLING,
        )  # fmt: skip
        for row in made[:, ids.shape[1] :].tolist():
            yield re.sub(r"\w+$", "", tokenizer.decode(row))


def card(out: Path, library: Path, training: Path) -> dict[str, object]:
    """What the README and the tests state about the model."""
    corpus = json.loads((HERE / "corpus.json").read_text())
    trained = json.loads(training.read_text())
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = FlintForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    known = {word for document in documents(library) for word in words(document.text)}
    texts = list(sample(model, tokenizer, len(tokenizer.get_vocab())))
    said = [word for text in texts for word in words(text)]
    ids_per_byte = (corpus["held_out_tokens"] - corpus["held_out_documents"] - 1) / corpus["held_out_bytes"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": {f.name: f.stat().st_size for f in sorted(out.iterdir()) if f.suffix in (".safetensors", ".gguf")},
        "held_out_bits_per_byte": round(trained["held_out_bits_per_token"] * ids_per_byte, 4),
        "unigram_bits_per_byte": corpus["unigram_bits_per_byte"],
        "generated_words": len(said),
        "share_of_words_in_sources": round(sum(word in known for word in said) / len(said), 4),
        "samples": texts[::SAMPLES],
    }


def main() -> None:
    """Export, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help="folder Lib of CPython 3.11.7")
    parser.add_argument("--trained", type=Path, required=True, help="what train.py wrote")
    parser.add_argument("--tokenizer", type=Path, default=Path("out/tiny-flint/tokenizer.json"))
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    write_checkpoint(arguments.trained, arguments.tokenizer, arguments.out)
    shutil.copyfile(arguments.trained / "training.json", arguments.out / "training.json")
    facts = card(arguments.out, arguments.library, arguments.out / "training.json")
    _write_json(arguments.out / "card.json", facts)
    print(json.dumps(facts, indent=2, ensure_ascii=False))


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
