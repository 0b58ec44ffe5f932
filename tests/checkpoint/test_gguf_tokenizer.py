"""The tokenizer in a GGUF file against one that package tokenizers built and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from flintc.checkpoint.gguf_scan import GgufFile
from flintc.checkpoint.gguf_tokenizer import tokenizer_from_gguf, tokenizer_to_gguf

SPECIAL, VISIBLE = ["<|endoftext|>", "<|user|>", "<|observation|>"], ["<think>", "</think>"]
TEXTS = [
    "It's 12345 o'clock; we'LL see they've 7 cats, don't we?",
    "日本語のテキストと漢字かな交じり文 mixed with English 2024年",
    "def f(x):\n    return x ** 2  # squared\n\n\n\tindented\r\n",
    "émigré naïve Ünïcödé — “quotes” … ¿qué? 한국어 русский עברית عربى हिन्दी",
    "   leading, trailing   \n \n  and 🙂👩‍👩‍👧 emoji<think>why?</think><|user|>hello<|endoftext|>",
]
VOCAB = 700


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),  # noqa: RUF001
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in VISIBLE])
    return tokenizer


@pytest.fixture(scope="module")
def metadata(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a GGUF file written by package gguf holds, read back by the scan."""
    path = tmp_path_factory.mktemp("tokenizer") / "x.gguf"
    vocab = {i: token for token, i in trained.get_vocab(with_added_tokens=True).items()}
    kinds = {trained.token_to_id(t): gguf.TokenType.CONTROL for t in SPECIAL}
    kinds |= {trained.token_to_id(t): gguf.TokenType.USER_DEFINED for t in VISIBLE}
    padded = [gguf.TokenType.UNUSED] * (VOCAB - len(vocab))
    writer = gguf.GGUFWriter(path, "flint")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("flint")
    writer.add_token_list([vocab.get(i, f"[PAD{i}]") for i in range(VOCAB)])
    writer.add_token_types([kinds.get(i, gguf.TokenType.NORMAL) for i in range(len(vocab))] + padded)
    writer.add_token_merges([" ".join(m) for m in json.loads(trained.to_str())["model"]["merges"]])
    writer.add_eos_token_id(trained.token_to_id("<|endoftext|>"))
    writer.add_eot_token_id(trained.token_to_id("<|user|>"))
    writer.add_eom_token_id(trained.token_to_id("<|observation|>"))
    writer.add_pad_token_id(trained.token_to_id("<|endoftext|>"))
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(GgufFile(path).metadata)


@pytest.fixture(scope="module")
def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    backend = tokenizer_from_gguf(metadata).backend
    assert backend is not None
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_the_original(trained: Tokenizer, rebuilt: Tokenizer, text: str) -> None:
    ids = trained.encode(text).ids
    assert rebuilt.encode(text).ids == ids
    for skip in (True, False):
        assert rebuilt.decode(ids, skip_special_tokens=skip) == trained.decode(ids, skip_special_tokens=skip)
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60) | st.text("a1 '\n\r\ts.T中の-é", max_size=40))
def test_encodes_any_text_as_the_original(trained: Tokenizer, rebuilt: Tokenizer, text: str) -> None:
    assert rebuilt.encode(text).ids == trained.encode(text).ids


def test_ids_of_padding_are_no_tokens(trained: Tokenizer, rebuilt: Tokenizer) -> None:
    assert rebuilt.get_vocab(with_added_tokens=True) == trained.get_vocab(with_added_tokens=True)


def test_the_splits_come_in_three_stages(rebuilt: Tokenizer) -> None:
    pieces = [p for p, _ in rebuilt.pre_tokenizer.pre_tokenize_str("It's 12345漢字かなabc!?\n\n  x")]
    decoder = decoders.ByteLevel()
    expected = ["It", "'s", " ", "123", "45", "漢字かな", "abc", "!?\n\n", " ", " x"]
    assert [decoder.decode([p]) for p in pieces] == expected


def test_stop_ids_template_and_special_tokens(trained: Tokenizer, metadata: dict[str, Any]) -> None:
    found = tokenizer_from_gguf(metadata)
    assert found.stop_ids == tuple(trained.token_to_id(t) for t in SPECIAL)
    assert found.chat_template == "{{ messages[0].content }}"
    assert found.special_tokens == {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def test_a_beginning_is_put_before_a_text_where_the_file_says_so(metadata: dict[str, Any], rebuilt: Tokenizer) -> None:
    bos = rebuilt.token_to_id("<|endoftext|>")
    asked = metadata | {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": True}
    backend = tokenizer_from_gguf(asked).backend
    assert backend is not None
    plain = rebuilt.encode("hello").ids
    assert backend.encode("hello").ids == [bos, *plain]
    assert backend.encode("hello", add_special_tokens=False).ids == plain


@pytest.mark.parametrize("text", ["a:b", "x:1", "$A"])
def test_the_text_of_a_beginning_is_no_syntax(metadata: dict[str, Any], rebuilt: Tokenizer, text: str) -> None:
    tokens, types = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    tokens[-1], types[-1] = text, gguf.TokenType.CONTROL.value
    changed = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    asked = {"tokenizer.ggml.bos_token_id": VOCAB - 1, "tokenizer.ggml.add_bos_token": True}
    backend = tokenizer_from_gguf(changed | asked).backend
    assert backend is not None
    assert backend.encode("hello").ids == [VOCAB - 1, *rebuilt.encode("hello").ids]


MISSING = {
    "tokens": ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
    "tokens of another type": ({"tokenizer.ggml.tokens": [1, 2]}, "no tokenizer.ggml.tokens"),
    "merges": ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
    "merges of another type": ({"tokenizer.ggml.merges": "a b"}, "not a list"),
    "merges of no tokens": ({"tokenizer.ggml.merges": ["zzz qqq"]}, "joins what are no tokens"),
    "merges without a space": ({"tokenizer.ggml.merges": ["ab"]}, "joins what are no tokens"),
    "types too few": ({"tokenizer.ggml.token_type": [1, 1]}, "one type for each token"),
    "another model": ({"tokenizer.ggml.model": "llama"}, "only 'gpt2' with 'flint'"),
    "another pre-tokenizer": ({"tokenizer.ggml.pre": "qwen2"}, "only 'gpt2' with 'flint'"),
}


@pytest.mark.parametrize("case", MISSING)
def test_an_unusable_tokenizer_is_none_and_says_why(metadata: dict[str, Any], case: str) -> None:
    change, reason = MISSING[case]
    changed = {k: v for k, v in (metadata | change).items() if v is not None}
    found = tokenizer_from_gguf(changed)
    assert found.backend is None and found.missing is not None and reason in found.missing
    assert found.chat_template is not None


def test_a_token_twice(metadata: dict[str, Any]) -> None:
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[1] = tokens[0]
    assert "twice" in (tokenizer_from_gguf(metadata | {"tokenizer.ggml.tokens": tokens}).missing or "")


def test_ids_out_of_range_are_ignored(metadata: dict[str, Any]) -> None:
    found = tokenizer_from_gguf(metadata | {"tokenizer.ggml.eos_token_id": 10**6, "tokenizer.ggml.eot_token_id": "x"})
    assert len(found.stop_ids) == 1 and "eos_token" not in found.special_tokens


def test_metadata_of_a_tokenizer_gives_it_back(trained: Tokenizer, metadata: dict[str, Any]) -> None:
    stops = [trained.token_to_id(t) for t in SPECIAL]
    again = tokenizer_to_gguf(trained, VOCAB, stops, "{{ messages[0].content }}")
    general = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
    assert again == general


def test_a_tokenizer_that_gguf_cannot_say_is_refused(trained: Tokenizer) -> None:
    other = Tokenizer.from_str(trained.to_str())
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(ValueError, match="does not split text"):
        tokenizer_to_gguf(other, VOCAB)
    with pytest.raises(ValueError, match="no byte-level BPE"):
        tokenizer_to_gguf(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), VOCAB)


def with_steps(trained: Tokenizer, *steps: Any) -> Tokenizer:
    """``trained`` with a post-processor of these steps."""
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(list(steps))
    return tokenizer


def template(single: str, **tokens: int) -> Any:
    special = [{"id": name, "ids": [i], "tokens": [name]} for name, i in tokens.items()]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=special)


OFFSETS = processors.ByteLevel(trim_offsets=False)


@pytest.mark.parametrize("around", [(), (OFFSETS,)], ids=["template", "template among offsets"])
def test_a_token_before_every_text_is_carried_over(trained: Tokenizer, around: tuple[Any, ...]) -> None:
    bos = trained.token_to_id("<|endoftext|>")
    original = with_steps(trained, *around, template("begin $A", begin=bos))
    made = tokenizer_to_gguf(original, VOCAB, bos_token="<|endoftext|>")
    assert (made["tokenizer.ggml.bos_token_id"], made["tokenizer.ggml.add_bos_token"]) == (bos, True)
    found = tokenizer_from_gguf(made)
    assert found.backend is not None and found.special_tokens["bos_token"] == "<|endoftext|>"
    for text in TEXTS:
        for special in (True, False):
            expected = original.encode(text, add_special_tokens=special).ids
            assert found.backend.encode(text, add_special_tokens=special).ids == expected
    assert original.encode("x").ids[0] == bos
    assert tokenizer_to_gguf(found.backend, VOCAB) == made


@pytest.mark.parametrize("step", [OFFSETS, template("$A")], ids=["offsets", "nothing added"])
def test_what_alters_no_ids_needs_no_word(trained: Tokenizer, step: Any) -> None:
    assert tokenizer_to_gguf(with_steps(trained, step), VOCAB) == tokenizer_to_gguf(trained, VOCAB)


def test_the_token_that_templates_begin_with_is_carried_over(trained: Tokenizer) -> None:
    made = tokenizer_to_gguf(trained, VOCAB, bos_token="<|user|>")
    assert made["tokenizer.ggml.add_bos_token"] is False
    found = tokenizer_from_gguf(made)
    assert found.special_tokens == {"bos_token": "<|user|>"}
    assert found.backend is not None and found.backend.encode("x").ids == trained.encode("x").ids
    assert tokenizer_to_gguf(trained, VOCAB, bos_token="<|none|>") == tokenizer_to_gguf(trained, VOCAB)


ADDING = {
    "a token after": (template("$A e", e=1),),
    "two tokens before": (template("b c $A", b=1, c=2),),
    "the text twice": (template("$A $A"),),
    "two templates": (template("b $A", b=1), template("c $A", c=2)),
    "another kind": (processors.BertProcessing(("a", 1), ("b", 2)),),
}


@pytest.mark.parametrize("case", ADDING)
def test_other_additions_to_a_text_are_refused(trained: Tokenizer, case: str) -> None:
    with pytest.raises(ValueError, match="more after splitting than put one token before"):
        tokenizer_to_gguf(with_steps(trained, *ADDING[case]), VOCAB)


def test_what_else_alters_ids_is_refused(trained: Tokenizer) -> None:
    other = Tokenizer.from_str(trained.to_str())
    other.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="GGUF cannot say: normalizer"):
        tokenizer_to_gguf(other, VOCAB)
    other.normalizer = None
    other.enable_truncation(5)
    with pytest.raises(ValueError, match="GGUF cannot say: truncation"):
        tokenizer_to_gguf(other, VOCAB)
    other.no_truncation()
    assert tokenizer_to_gguf(other, VOCAB) == tokenizer_to_gguf(trained, VOCAB)


def test_two_tokens_for_one_key_are_refused(trained: Tokenizer) -> None:
    beginning = with_steps(trained, template("b $A", b=trained.token_to_id("<|user|>")))
    with pytest.raises(ValueError, match=r"puts id \d+ \(<\|user\|>\) before a text, but its bos_token is <\|end"):
        tokenizer_to_gguf(beginning, VOCAB, bos_token="<|endoftext|>")
    with pytest.raises(ValueError, match=r"puts id 699 \(None\) before a text"):
        tokenizer_to_gguf(with_steps(trained, template("b $A", b=699)), VOCAB)


def test_bytes_alone_need_no_merges(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "flint",
            "tokenizer.ggml.tokens": [*alphabet, "<|end|>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3],
        }
    )
    assert found.backend is not None
    text = "any text 中文 \x00<|end|>"
    ids = found.backend.encode(text).ids
    assert ids[-1] == 256 and found.backend.decode(ids, skip_special_tokens=False) == text
