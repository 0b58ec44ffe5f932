"""Tokenizer, chat template and streaming, against transformers where it does the same."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from flintc.errors import TokenizerError
from flintc.runtime.chat import ChatTemplate
from flintc.runtime.demo_tokenizer import demo_tokenizer, write_demo_tokenizer
from flintc.runtime.tokenizer import Tokenizer, load_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 < 4 & 'so'?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "compare", "arguments": {"text": "3 < 4", "n": 2}}}],
    },
    {"role": "tool", "content": "true"},
]
TOOLS = [{"type": "function", "function": {"name": "compare", "description": "ünïcode <b>", "parameters": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_demo_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def merged():
    """A byte-level BPE with merges, so that tokens end inside characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    backend.train_from_iterator(["größer naïve 東京都 日本語 😀😃😄 the then they "] * 5, trainer)
    return Tokenizer(backend)


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [stream.push(i) for i in ids], stream.finish()


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_streaming_valid_text_never_shows_a_broken_character(merged, text):
    ids = merged.encode(text)
    pieces, rest = streamed(merged, ids)
    assert "".join(pieces) + rest == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in (*pieces, rest))


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 329), max_size=40))
def test_streaming_any_ids_adds_up_to_their_text(merged, ids):
    pieces, rest = streamed(merged, ids)
    assert "".join(pieces) + rest == merged.decode(ids)


def test_streaming_hands_out_text_without_delay(merged):
    ids = merged.encode("the 東京 😀!")
    pieces, rest = streamed(merged, ids)
    assert rest == ""
    assert pieces[0]
    assert pieces[-1].endswith("!")


def test_streaming_with_a_decoder_that_treats_the_first_token_specially():
    words = ["▁the", "▁cat", "s", "▁sat"]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    pieces, rest = streamed(tokenizer, [0, 1, 2, 3])
    assert "".join(pieces) + rest == "the cats sat"


def test_endless_broken_bytes_still_stream():
    tokenizer = Tokenizer(demo_tokenizer())
    continuation = tokenizer.encode("é")[1]
    pieces, rest = streamed(tokenizer, [continuation] * 20)
    assert sum(map(len, pieces)) == 19
    assert rest == "\ufffd"


def test_same_ids_and_texts_as_transformers(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = "Grüße, 東京 😀\n\tdone<|user|> <think>x</think>"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_same_prompt_as_transformers(folder, tools):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        CONVERSATION, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
    )
    ours = load_tokenizer(folder)
    assert ours.encode_chat(CONVERSATION, tools) == theirs(expected, add_special_tokens=False)["input_ids"]


def test_prompt_of_the_demo_template_written_out(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}], enable_thinking=False)
    backend = demo_tokenizer()
    assert ids == [
        backend.token_to_id("<|user|>"), *tokenizer.encode("\nhi"),
        backend.token_to_id("<|assistant|>"), *tokenizer.encode("\n"), backend.token_to_id("</think>"),
    ]  # fmt: skip


def test_count_is_past_the_highest_id(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.count == 269
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}))
    assert Tokenizer(backend).count == 8


def test_template_from_tokenizer_config(tmp_path):
    write_demo_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat([])
    source = "{{ eos_token }}{{ bos_token }}{{ messages[0].content }}"
    for template in (source, [{"name": "other", "template": "no"}, {"name": "default", "template": source}]):
        config = {"eos_token": {"content": "E"}, "bos_token": "B", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "EBhi"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "not a chat template"),
        ("{{ raise_exception('no images') }}", "no images"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{% set _ = messages.append(1) %}", "refuses"),
        ("{{ messages[0].content.missing.more }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
    ],
)
def test_bad_or_hostile_templates(source, words):
    with pytest.raises(TokenizerError, match=rf"here\.jinja.*{words}"):
        ChatTemplate(source, "here.jinja").render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("{", "cannot be read"),
        ("[]", "expected a JSON object"),
        ('{"model": {"type": "Nonsense"}}', "not a tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": []}}', "incomplete"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_unusable_tokenizer_files(tmp_path, content, words):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*{words}"):
        load_tokenizer(tmp_path)
