"""The tokenizer that a GGUF file carries, as a ``tokenizers`` backend, and back to metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from flintc.checkpoint.gguf_scan import MetaValue

_GGML = "tokenizer.ggml."
MODEL, PRE, TOKENS, TYPES, MERGES = (_GGML + k for k in ("model", "pre", "tokens", "token_type", "merges"))
ADD_BOS = _GGML + "add_bos_token"
BOS, EOS, EOT, EOM, PAD = (f"{_GGML}{k}_token_id" for k in ("bos", "eos", "eot", "eom", "padding"))
CHAT_TEMPLATE = "tokenizer.chat_template"
#: Metadata keys that are read here.
TOKENIZER_KEYS = (MODEL, PRE, TOKENS, TYPES, MERGES, ADD_BOS, BOS, EOS, EOT, EOM, PAD, CHAT_TEMPLATE)

#: Token types. Unused ids pad the vocabulary; control tokens are left out of decoded text, user-defined ones are not.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

#: Splits of pre-tokenizer ``flint``, each applied to what the one before left whole: numbers by up to three digits;
#: runs of Han characters and kana; contractions, words, punctuation, line ends and spaces.
FLINT_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF file says about text.

    backend: None where the file's tokenizer is absent, incomplete or of another kind; ``missing`` says why.
    stop_ids: ids that end a turn. special_tokens: texts a chat template may use, such as ``bos_token``.
    """

    backend: tokenizers.Tokenizer | None
    missing: str | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """The tokenizer in a file's metadata. Never fails: a defect is the result's ``missing``."""
    template = metadata.get(CHAT_TEMPLATE)
    missing = _defect(metadata)
    return GgufTokenizer(
        backend=None if missing else _backend(metadata),
        missing=missing,
        chat_template=template if isinstance(template, str) else None,
        stop_ids=_stop_ids(metadata),
        special_tokens=_special_tokens(metadata),
    )


def _defect(metadata: Mapping[str, Any]) -> str | None:
    """Why no tokenizer can be built; None where one can."""
    tokens, types, merges = (metadata.get(k) for k in (TOKENS, TYPES, MERGES))
    if not _are(tokens, str) or not tokens:
        return f"it has no {TOKENS}"
    if metadata.get(MODEL) != "gpt2" or metadata.get(PRE) != "flint":
        kind = f"{metadata.get(MODEL)!r} with pre-tokenizer {metadata.get(PRE)!r}"
        return f"its tokenizer is {kind}; only 'gpt2' with 'flint' is supported"
    if types is not None and (not _are(types, int) or len(types) != len(tokens)):
        return f"{TYPES} does not give one type for each token"
    if merges is not None and not _are(merges, str):
        return f"{MERGES} is not a list of texts"
    kinds = types or [NORMAL] * len(tokens)
    vocab = {token for token, kind in zip(tokens, kinds, strict=True) if kind != UNUSED}
    if len(vocab) < sum(kind != UNUSED for kind in kinds):
        return f"{TOKENS} holds a token twice"
    if not merges and any(len(t) > 1 and k in (NORMAL, 2) for t, k in zip(tokens, kinds, strict=True)):
        return f"it has tokens of several characters but no {MERGES} that form them"
    return _merge_defect(merges or (), vocab)


def _merge_defect(merges: Sequence[str], vocab: set[str]) -> str | None:
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= vocab:
            return f"merge {merge!r} joins what are no tokens"
    return None


def _are(value: object, kind: type) -> bool:
    """Whether ``value`` is a list of ``kind`` (in which true and false are no numbers)."""
    return isinstance(value, list) and all(type(v) is kind for v in value)


def _backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens: list[str] = metadata[TOKENS]
    kinds: list[int] = metadata.get(TYPES) or [NORMAL] * len(tokens)
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in metadata.get(MERGES) or ())]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = flint_pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    bos = _token_id(metadata, BOS)
    if metadata.get(ADD_BOS) is True and bos is not None:
        # Under a name of its own: a token's text may hold what is syntax here.
        named = {"id": "bos", "ids": [bos], "tokens": [tokens[bos]]}
        backend.post_processor = processors.TemplateProcessing(single=["bos", "$A"], pair=None, special_tokens=[named])
    return backend


def flint_pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """The three splits in their order, then bytes as printable characters."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in FLINT_SPLITS]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _token_id(metadata: Mapping[str, Any], key: str) -> int | None:
    """The id under ``key``; None where it is absent or the id of no token."""
    value, tokens = metadata.get(key), metadata.get(TOKENS)
    return value if type(value) is int and isinstance(tokens, list) and 0 <= value < len(tokens) else None


def _stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = (_token_id(metadata, key) for key in (EOS, EOT, EOM))
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    ids = {name: _token_id(metadata, key) for name, key in (("bos_token", BOS), ("eos_token", EOS), ("pad_token", PAD))}
    return {name: metadata[TOKENS][i] for name, i in ids.items() if i is not None and _are(metadata[TOKENS], str)}


def tokenizer_to_gguf(
    backend: tokenizers.Tokenizer,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
    chat_template: str | None = None,
    bos_token: str | None = None,
) -> dict[str, MetaValue]:
    """Metadata that :func:`tokenizer_from_gguf` turns into an equal tokenizer.

    vocab_size: rows of the embedding; ids that stand for no token become unused ones. Of ``stop_ids`` the first
    three are kept, which is all that GGUF has keys for. bos_token: what chat templates call so; left out where it is
    no token. ValueError where the backend is no byte-level BPE, splits text otherwise than pre-tokenizer ``flint`` and
    has merges that this could change, alters text before, or alters ids but for one that it puts before them.
    """
    state = json.loads(backend.to_str())
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"].get("merges", [])]
    if state["model"]["type"] != "BPE" or state["decoder"] is None or state["decoder"]["type"] != "ByteLevel":
        raise ValueError("the tokenizer is no byte-level BPE")
    if merges and state["pre_tokenizer"] != _pre_tokenizer_state():
        raise ValueError("the tokenizer does not split text as GGUF's pre-tokenizer 'flint' does")
    for step in ("normalizer", "truncation", "padding"):
        if state[step] is not None:
            raise ValueError(f"the tokenizer has a step that GGUF cannot say: {step}")
    tokens: list[str] = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, i in state["model"]["vocab"].items():
        tokens[i], kinds[i] = token, NORMAL
    for added in state["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    metadata: dict[str, Any] = {MODEL: "gpt2", PRE: "flint", TOKENS: tokens, TYPES: kinds}
    if merges:
        metadata[MERGES] = merges
    metadata.update(zip((EOS, EOT, EOM), stop_ids, strict=False))
    if stop_ids:
        metadata[PAD] = stop_ids[0]
    if chat_template is not None:
        metadata[CHAT_TEMPLATE] = chat_template
    return metadata | _bos(backend, _id_before_text(state["post_processor"]), bos_token)


def _bos(backend: tokenizers.Tokenizer, added: int | None, bos_token: str | None) -> dict[str, MetaValue]:
    """Metadata of the token ``added`` before every text and of ``bos_token``, for both of which there is one key."""
    if added is None:
        named = None if bos_token is None else backend.token_to_id(bos_token)
        return {} if named is None else {BOS: named, ADD_BOS: False}
    text = backend.id_to_token(added)
    if text is None or bos_token not in (None, text):
        raise ValueError(f"the tokenizer puts id {added} ({text}) before a text, but its bos_token is {bos_token}")
    return {BOS: added, ADD_BOS: True}


def _id_before_text(processor: Any) -> int | None:
    """The id that a post-processor puts before every text, if any; ValueError where it does more to the ids."""
    steps = processor["processors"] if processor is not None and processor["type"] == "Sequence" else [processor]
    altering = [step for step in steps if step is not None and step["type"] != "ByteLevel"]  # which moves offsets only
    match [(step["type"], step.get("single"), step.get("special_tokens")) for step in altering]:
        case [] | [("TemplateProcessing", [{"Sequence": {"id": "A"}}], _)]:
            return None
        case [("TemplateProcessing", [{"SpecialToken": {"id": name}}, {"Sequence": {"id": "A"}}], known)]:
            ids: list[int] = known[name]["ids"]
            if len(ids) == 1:
                return ids[0]
    raise ValueError("the tokenizer does more after splitting than put one token before a text")


def _pre_tokenizer_state() -> Any:
    empty = tokenizers.Tokenizer(models.BPE())
    empty.pre_tokenizer = flint_pre_tokenizer()
    return json.loads(empty.to_str())["pre_tokenizer"]
