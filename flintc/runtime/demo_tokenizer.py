"""A small complete tokenizer for synthetic checkpoints: one token per byte, and the special tokens of a chat."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from flintc.checkpoint.gguf_scan import MetaValue
from flintc.checkpoint.gguf_tokenizer import tokenizer_to_gguf

END = "<|endoftext|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
#: Marks that stay visible in the text, as in published checkpoints.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>",
         "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip

CHAT_TEMPLATE = """\
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}<tool_call>{{ call.name }}
{%- for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}<|observation|>
{{ message.content }}
{%- elif message.role in ('system', 'user') %}<|{{ message.role }}|>
{{ message.content }}
{%- else %}{{ raise_exception('unknown role ' ~ message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}
"""


def demo_tokenizer() -> Tokenizer:
    """Ids 0..255 stand for bytes, then follow the special tokens; needs a vocabulary of at least 269."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *ROLES)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return backend


def write_demo_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json into ``folder``.

    Generation stops at the end of the text and where another speaker would begin.
    """
    backend = demo_tokenizer()
    stops = _stop_ids(backend)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {"eos_token": END, "pad_token": END})
    _write_json(folder / "generation_config.json", {"eos_token_id": stops, "pad_token_id": stops[0]})


def demo_metadata(vocab: int) -> dict[str, MetaValue]:
    """The same as metadata of a GGUF file whose embedding has ``vocab`` rows."""
    backend = demo_tokenizer()
    return tokenizer_to_gguf(backend, vocab, _stop_ids(backend), CHAT_TEMPLATE)


def _stop_ids(backend: Tokenizer) -> list[int]:
    ids = backend.get_vocab(with_added_tokens=True)
    return [ids[text] for text in (END, "<|user|>", "<|observation|>")]


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
