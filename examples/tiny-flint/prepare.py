"""Step 1 of 3: sources to token ids. Needs CPython 3.11.7's Lib folder and the packages of flintc; no GPU.

    python examples/tiny-flint/prepare.py --library .../lib/python3.11 --out out/tiny-flint

Trains the tokenizer (byte-level BPE with Flint's three splits), packs the text into ``corpus.npz``, and checks both
against the hashes in ``corpus.json``. Equal sources give equal bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from corpus import Document, documents, exchanges, record
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from flintc.checkpoint.gguf_tokenizer import flint_pre_tokenizer
from flintc.runtime.chat import ChatTemplate
from flintc.runtime.demo_tokenizer import CHAT_TEMPLATE, END, MARKS, ROLES

RECORD = Path(__file__).with_name("corpus.json")
#: Rows of the embedding; the ids above the tokenizer's last are padding, as in the published model.
VOCAB, PADDING = 2048, 11


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE with Flint's splits; the special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = flint_pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - PADDING - 1 - len(ROLES) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *ROLES)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return tokenizer


def chat_texts(sources: Sequence[Document]) -> list[str]:
    """Every exchange through the chat template; every other time it is the model that skips the thinking."""
    template = ChatTemplate(CHAT_TEMPLATE, "chat_template.jinja")
    texts = []
    for number, exchange in enumerate(e for document in sources for e in exchanges(document)):
        thinks = number % 2 == 1
        prompt = template.render([{"role": "user", "content": exchange.question}], enable_thinking=thinks)
        texts.append(prompt + ("</think>" if thinks else "") + exchange.answer)
    return texts


def pack(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all texts, each after an end-of-text (u16), and the index of each text's first id (i64)."""
    end = tokenizer.token_to_id(END)
    ids: list[int] = []
    starts = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.append(end)
        starts.append(len(ids))
        ids.extend(encoding.ids)
    return np.array([*ids, end], dtype=np.uint16), np.array(starts, dtype=np.int64)


def shuffled(texts: Sequence[str]) -> list[str]:
    """In an order that depends on the texts alone."""
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def unigram_bits(train: np.ndarray, held_out: np.ndarray, end: int) -> float:
    """Bits that a model of token frequencies (plus one) needs for the held-out text."""
    counts = np.bincount(train[train != end], minlength=VOCAB) + 1.0
    return float(-np.log2(counts / counts.sum())[held_out[held_out != end]].sum())


def prepare(library: Path, out: Path) -> dict[str, object]:
    """Write tokenizer and corpus into ``out``; returns the facts that ``corpus.json`` records."""
    sources = list(documents(library))
    train = [d for d in sources if not d.held_out]
    held_out = [d.text for d in sources if d.held_out]
    tokenizer = train_tokenizer([d.text for d in train])
    chats = chat_texts(train)
    ids, starts = pack(tokenizer, shuffled([d.text for d in train] + chats))
    held_ids, held_starts = pack(tokenizer, held_out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    np.savez(out / "corpus.npz", train=ids, starts=starts, held_out=held_ids, held_out_starts=held_starts)
    held_bytes = sum(len(text.encode()) for text in held_out)
    bits = unigram_bits(pack(tokenizer, [d.text for d in train])[0], held_ids, tokenizer.token_to_id(END))
    return {
        "documents": len(train),
        "exchanges": len(chats),
        "held_out_documents": len(held_out),
        "bytes": sum(len(d.text.encode()) for d in train),
        "held_out_bytes": held_bytes,
        "tokens": len(ids),
        "held_out_tokens": len(held_ids),
        "unigram_bits_per_byte": round(bits / held_bytes, 4),
        "tokenizer_sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
        "corpus_sha256": hashlib.sha256(ids.tobytes() + held_ids.tobytes()).hexdigest(),
    }


def main() -> None:
    """Prepare the corpus, and hold it against ``corpus.json`` (or, with --record, write that anew)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help="folder Lib of CPython 3.11.7")
    parser.add_argument("--out", type=Path, default=Path("out/tiny-flint"))
    parser.add_argument("--record", action="store_true", help="choose the files anew and record what comes out")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.library)
    facts = prepare(arguments.library, arguments.out)
    text = json.dumps(facts, indent=2) + "\n"
    if arguments.record:
        RECORD.write_text(text, encoding="utf-8")
    elif text != RECORD.read_text(encoding="utf-8"):
        raise SystemExit(f"not the recorded corpus:\n{text}")
    print(text, end="")


if __name__ == "__main__":
    main()
