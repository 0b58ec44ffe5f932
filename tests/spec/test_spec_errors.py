"""Wrong specs: each mistake is told at its line and column, with the nearest right word where there is one."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flintc.errors import SpecError
from flintc.ir.build import build
from flintc.spec import bind_defaults, load_spec

GOOD = (Path(__file__).parents[1] / "data" / "other.yaml").read_text()


def mistake(tmp_path: Path, text: str) -> SpecError:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        build(bind_defaults(load_spec(path)))
    return caught.value


def place_of(text: str, marked: str) -> tuple[int, int]:
    """Line and column of the ``@`` in ``marked``, a unique piece of ``text`` with the ``@`` taken out."""
    piece = marked.replace("@", "")
    assert text.count(piece) == 1, f"{piece!r} is there {text.count(piece)} times"
    at = text.index(piece) + marked.index("@")
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


# (what stands there, what is put in its place with @ where the mistake is, what is said)
CASES = {
    "unknown key": (
        "name: other",
        "name: other\n@dimension: {}",
        "unknown key 'dimension' (did you mean 'dimensions'?)",
    ),
    "unknown key inside": ("config: width,", "@confog: width,", "unknown key 'confog' (did you mean 'config'?)"),
    "unknown key unlike any": ("kv_page: 4", "kv_page: 4\n  @zzz: 1", "unknown key 'zzz' (known keys: accumulate"),
    "duplicate key": ("  head: {value: 16, config: head}", "  head: 16\n  @head: 16", "duplicate key 'head'"),
    "missing key": ("  output: scores\n", "", "missing key 'output'"),
    "missing op": ("{op: rope, in:", "@{in:", "missing key 'op'"),
    "wrong version": ("flintc: 1", "flintc: @2", "2 is not 1"),
    "bad name": ("name: other", "name: @Other One", "is not a name"),
    "bad dimension name": ("  head: {value: 16, config: head}", "  @Head: 16", "is not a name"),
    "list for a mapping": (
        "numerics:\n  attention_chunk: 8\n  kv_page: 4",
        "numerics: @[8]",
        "expected a mapping, not a list",
    ),
    "word for a number": ("kv_page: 4", "kv_page: @four", "expected a whole number"),
    "quoted number": ("kv_page: 4", "kv_page: @'4'", "expected a whole number"),
    "zero page": ("kv_page: 4", "kv_page: @0", "greater than 0"),
    "zero partials": ("kv_page: 4", "kv_page: 4\n  attention_partials: @0", "greater than 0"),
    "too many partials": ("kv_page: 4", "kv_page: 4\n  attention_partials: @1025", "less than or equal to 1024"),
    "partials of nothing": ("kv_page: 4", "kv_page: 4\n  attention_partials: @null", "expected a whole number"),
    "truth for a number": (
        "  head: {value: 16, config: head}",
        "  head: @true",
        "an expression or a mapping, not true or false",
    ),
    "null dimension": ("  head: {value: 16, config: head}", "  head: @null", "an expression or a mapping, not nothing"),
    "other numerics": ("kv_page: 4", "kv_page: 4\n  activations: @bf61", "'bf61' is not 'bf16' (did you mean 'bf16'?)"),
    "neither value nor default": (
        "  head: {value: 16, config: head}",
        "  head: @{config: head}",
        "needs either a value or a `default`",
    ),
    "both value and default": ("  head: {value: 16, config: head}", "  head: @{value: 1, default: 2}", "needs either"),
    "no layer count": ("  layers: {default: 4,", "  depth: {default: 4,", "missing dimension 'layers'"),
    "not an expression": ("scale: head ** -0.5", "scale: @head **", "is not an expression"),
    "call in an expression": ("scale: head ** -0.5", "scale: @abs(head)", "only numbers, names and"),
    "unknown dimension": (
        "scale: head ** -0.5",
        "scale: @heed ** -0.5",
        "unknown dimension 'heed' (did you mean 'head'?)",
    ),
    "dimension cycle": (
        "  head: {value: 16, config: head}",
        "  head: @half * 2\n  half: head / 2",
        "circle: head -> half -> head",
    ),
    "does not divide": ("  head: {value: 16, config: head}", "  head: @width / 7", "7 does not divide 96"),
    "negative window": (
        "reach: {default: 10,",
        "reach: {default: @-10,",
        "reach must be a positive whole number, not -10",
    ),
    "fractional size": (
        "width: {default: 96,",
        "width: {default: @96.5,",
        "width must be a positive whole number, not 96.5",
    ),
    "zero layers": ("layers: {default: 4,", "layers: {default: @0,", "layers must be a positive whole number"),
    "too many layers": ("layers: {default: 4,", "layers: @{default: 99999,", "more than"),
    "layer out of range": ("default: [0, 2]", "default: @[0, 4]", "layer 4 is not among the 4 layers"),
    "negative layer": ("default: [0, 2]", "default: [0, @-1]", "greater than or equal to 0"),
    "layer set with a taken name": (
        "layer_sets:\n",
        "layer_sets:\n  @first: {default: [0]}\n",
        "already has a meaning",
    ),
    "two forms of a set": ("config: {flags: near}", "config: @{flags: near, first: n}", "exactly one of"),
    "item without its list": ("config: {flags: near}", "config: @{item: near, flags: near}", "exactly one of"),
    "set that stands in for itself": (
        "config: {flags: near}",
        "config: {flags: near, absent: @near}",
        "layer set 'near' may itself be absent",
    ),
    "unknown set to be equal": ("numerics:", "checks: {same: [[near, @neer]]}\nnumerics:", "did you mean 'near'?"),
    "check of an unknown dimension": (
        "numerics:",
        "checks: {config: {k: {equals_dimension: @hed}}}\nnumerics:",
        "did you mean 'head'?",
    ),
    "weight of an unknown size": ("{shape: [pool, width],", "{shape: [pool, @wdth],", "did you mean 'width'?"),
    "weight of an unknown type": (
        "[tokens, width], type: bf16",
        "[tokens, width], type: @fp16",
        "'fp16' is not one of 'bf16', 'f32' or 'linear'",
    ),
    "weight without a shape": ("words: {shape: [tokens, width],", "@words: {", "missing key 'shape'"),
    "weight of no dimensions": ("closing: {shape: [width],", "closing: {shape: @[],", "at least one entry"),
    "weight form that is no name": ("safetensors: [speak]", "safetensors: [@{a: 1}]", "expected a tensor name"),
    "placeholder of a weight": ('["{layer}.guide"]', '@["{laser}.guide"]', "only {layer} and {expert}"),
    "half-layered weight": ('"{layer}.guide"', '"{layer}.guide", "guide"', "either every name holds {layer} or none"),
    "unknown op": ("{op: combine,", "{op: @combime,", "unknown op 'combime' (did you mean 'combine'?)"),
    "unknown attribute": ("k: picks,", "@kk: picks,", "topk has no attribute 'kk'"),
    "misspelt key of an op": ("in: seen, weight: back,", "in: seen, @weigth: back,", "did you mean 'weight'?"),
    "missing attribute": (
        "{op: topk, in: odds, out: [who, share], k: picks,",
        "@{op: topk, in: odds, out: [who, share],",
        "topk needs the attribute 'k'",
    ),
    "missing weight": ("in: seen, weight: back,", "in: seen,", "linear needs a `weight`"),
    "weight that an op cannot take": (
        "{op: silu_mul, in: halves,",
        "{op: silu_mul, @weight: back, in: halves,",
        "silu_mul takes no weight",
    ),
    "unknown weight": (
        "in: seen, weight: back,",
        "in: seen, weight: @bakc,",
        "unknown weight 'bakc' (did you mean 'back'?)",
    ),
    "too few operands": ("in: [parts, share]", "in: @[parts]", "combine reads y, weights; 1 values are given"),
    "too many operands": ("in: [q, k], out: [q, k]", "in: @[q, k, positions], out: [q, k]", "rope reads q, k; 3"),
    "too few results": ("out: [who, share]", "out: @who", "topk makes ids, weights; 1 names are bound"),
    "undefined value": ("in: [parts, share]", "in: [parts, @shore]", "undefined value 'shore' (did you mean 'share'?)"),
    "value of a later block": (
        "in: stream, weight: before_mix",
        "in: @branch, weight: before_mix",
        "undefined value 'branch'",
    ),
    "rebinding what is given": ("out: odds}", "out: @positions}", "router cannot bind 'positions'"),
    "binding the cache": ("out: odds}", "out: @cache}", "router cannot bind 'cache'"),
    "same name twice in a layer": (
        "{op: linear, name: back, in: seen,",
        "@{op: linear, name: mixer, in: seen,",
        "a second op named 'mixer' in one layer",
    ),
    "wrong shape": ("weight: close, out: parts", "weight: open, out: parts", "its rows hold 96 values, the input 80"),
    "wrong type": ("in: halves, out: inner}", "in: who, out: inner}", "gate_up is i32[B, 2], expected bf16 or f32"),
    "rows that do not divide": ("heads: queries + 2 * keys}", "heads: 7}", "heads 7 does not divide the 192 rows"),
    "heads that do not divide": (
        "queries: {default: 6,",
        "queries: {default: 7,",
        "7 query heads are not a multiple of 3",
    ),
    "heads out of range": ("heads: [queries, keys]", "heads: [queries, 99]", "does not lie within the 12 heads"),
    "fraction for a head": ("heads: [queries, keys]", "heads: [@0.5, keys]", "must be a whole number, not 0.5"),
    "unknown word in an attribute": ("k: picks,", "k: @pick,", "unknown name 'pick' (did you mean 'picks'?)"),
    "unknown score": ("score: softmax", "score: softmix", "score must be sigmoid or softmax, not 'softmix'"),
    "too many experts": ("k: picks,", "k: pool + 1,", "cannot choose 7 of 6 experts"),
    "window of one op alone": (
        "window: reach}\n    - {op: attention",
        "window: reach - 1}\n    - {op: attention",
        "differs from",
    ),
    "negative window of an op": (
        "[queries + keys, keys], window: reach}",
        "[queries + keys, keys], window: @-reach}",
        "window must be a positive whole number, not -10",
    ),
    "eps of zero": ("tiny: 1e-5", "tiny: 0", "eps must be a positive number, not 0"),
    "cache before it is written": (
        "    - {op: kv_write, in: [k, m, cache], out: cache, v_heads: [queries + keys, keys]}\n",
        "",
        "the cache is read before kv_write wrote it",
    ),
    "layer weight outside the layers": (
        "in: ids, weight: words",
        "in: ids, weight: @guide",
        "weight 'guide' belongs to a layer",
    ),
    "layer op outside the layers": ("after: [settle]", "after: [settle, far]", "a cache belongs to a layer"),
    "rope without its base": (
        "  rope_theta: {default: 500.0, config: theta, gguf: rope.freq_base}\n",
        "",
        "needs the number 'rope_theta'",
    ),
    "unknown block": ("{block: choose}", "{block: @chose}", "unknown block 'chose' (did you mean 'choose'?)"),
    "unknown block outside": ("head: [speak]", "head: [@speek]", "unknown block 'speek' (did you mean 'speak'?)"),
    "unknown layer set": ("when: near}", "when: @neer}", "unknown layer set 'neer' (did you mean 'near'?)"),
    "condition outside the layers": (
        "weight: words, out: stream}",
        "weight: words, out: stream, @when: near}",
        "outside the layers",
    ),
    "undefined output": ("output: scores", "output: @score", "undefined value 'score' (did you mean 'scores'?)"),
    "unknown pass": (
        "  - combine-gemv",
        "  - @combine-gem",
        "unknown pass 'combine-gem' (did you mean 'combine-gemv'?)",
    ),
    "pass twice": ("  - combine-gemv", "  - combine-gemv\n  - @combine-gemv", "pass 'combine-gemv' is listed twice"),
    "passes out of order": (
        "  - combine-gemv\n  - dependent-launch",
        "  - dependent-launch\n  - @combine-gemv",
        "comes after 'dependent-launch'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mistake(case, tmp_path):
    old, new, said = CASES[case]
    assert GOOD.count(old) == 1, f"{old!r} is there {GOOD.count(old)} times"
    bad = GOOD.replace(old, new.replace("@", ""))
    error = mistake(tmp_path, bad)
    assert said in str(error)
    assert str(error).startswith(f"{tmp_path / 'bad.yaml'}:{error.place.line}:{error.place.column}: ")
    if "@" in new:
        assert (error.place.line, error.place.column) == place_of(bad, new)


def test_shape_mistakes_are_placed_at_their_op(tmp_path):
    bad = GOOD.replace("weight: close, out: parts", "weight: open, out: parts")
    error = mistake(tmp_path, bad)
    assert (error.place.line, error.place.column) == place_of(bad, "@{op: expert_linear, name: close")


def test_ops_of_unused_blocks_are_checked_too(tmp_path):
    bad = GOOD.replace("blocks:\n", "blocks:\n  spare:\n    - {op: nrom, in: x, out: y}\n")
    assert "did you mean 'norm'?" in str(mistake(tmp_path, bad))


def test_alias_bomb(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert "aliases expand" in str(mistake(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize("text", ["", "hello", "a: [", "- a", "\x00\x01"])
def test_no_spec_at_all(text, tmp_path):
    error = mistake(tmp_path, text)
    assert str(error).startswith(f"{tmp_path / 'bad.yaml'}:1:") and error.exit_code == 2


def test_the_known_passes_are_the_callers_to_say(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(GOOD[: GOOD.index("pipeline:")] + "pipeline: [b, c]\n")
    assert load_spec(path, known_passes=("a", "b", "c")).pipeline == ("b", "c")
    with pytest.raises(SpecError, match="comes after 'b'"):
        load_spec(path, known_passes=("c", "b"))


_WORDS = sorted({word for word in re.split(r"[^\w.-]+", GOOD) if word})
_PIECE = st.one_of(
    st.sampled_from(
        [*_WORDS, "{", "}", "[", "]", ":", ",", "\n", "  ", "&a", "*a", "- ", "null", "-1", "0", "1e9", "''"]
    ),
    st.text(max_size=3),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_spec_error_or_another_spec(data, tmp_path):
    """One to three edits anywhere in a good spec: it still is one, or the mistake is told in one line."""
    text = GOOD
    for _ in range(data.draw(st.integers(1, 3))):
        word = data.draw(st.sampled_from([m.span() for m in re.finditer(r"[\w.-]+|[^\w\s]|\n", text)]))
        text = text[: word[0]] + data.draw(_PIECE) + text[word[1] :]
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        build(bind_defaults(load_spec(path)), "nvfp4")
    except SpecError as error:
        assert "\n" not in str(error) and re.match(r".*bad\.yaml:\d+:\d+: .", str(error))
