"""YAML text to data with places, and everything that is refused on the way."""

import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flintc.errors import SpecError, UsageError
from flintc.spec.source import parse_document, read_document


def refused(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_document(text, "s.yaml")
    return caught.value


def where(error: SpecError) -> tuple[int, int]:
    return error.place.line, error.place.column


_plain = st.one_of(
    st.integers(-99, 99), st.booleans(), st.none(), st.text("abcxyz _-:#'\"é", max_size=6), st.floats(-9, 9)
)
_tree = st.recursive(
    _plain, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text("abc", min_size=1), t, max_size=3)
)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), _tree, min_size=1))
def test_data_is_what_pyyaml_reads(data):
    text = yaml.safe_dump(data, allow_unicode=True)
    assert parse_document(text, "s.yaml").data == yaml.safe_load(text)


def test_places_of_keys_and_values():
    document = parse_document("a: 1\nbc:\n  - x\n  - {d: 5}\n", "s.yaml")
    assert str(document.key_place(("bc",))) == "s.yaml:2:1"
    assert str(document.place(("bc", 0))) == "s.yaml:3:5"
    assert str(document.key_place(("bc", 1, "d"))) == "s.yaml:4:6"
    assert str(document.place(("bc", 1, "d"))) == "s.yaml:4:9"


def test_a_path_that_is_not_there_is_placed_at_what_holds_it():
    document = parse_document("a:\n  b: 1\n", "s.yaml")
    assert document.place(("a", "c", 3)) == document.place(("a",))


def test_duplicate_key():
    error = refused("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert where(error) == (4, 3) and "duplicate key 'b', first given on line 2" in str(error)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_empty(text):
    assert "empty" in str(refused(text))


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "just words\n", "42\n", "!!python/name:os.system {}\n", "!!set {a, b}\n"]
)
def test_not_a_mapping(text):
    assert "expected a mapping" in str(refused(text))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1, 2\nb: 3\n", (2, 2)),
        ("a: 'open\n", (2, 1)),
        ("a: 1\n\tb: 2\n", (2, 1)),
        ("a: b: c\n", (1, 5)),
        ("a: *nowhere\n", (1, 4)),
        ("a: 1\n---\nb: 2\n", (2, 1)),
        ("ok: 1\nbad: \x01\n", (2, 6)),
        ("{" * 5, (1, 6)),
    ],
)
def test_not_yaml(text, place):
    error = refused(text)
    assert "not YAML" in str(error) and where(error) == place


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']\n",
        "a: !!set {b, c}\n",
        "a: !!omap [b: 1]\n",
        "a: !custom 1\n",
        "a: 2020-01-01\n",
        "a: !!binary aGk=\n",
        "a: !!int abc\n",
        "a: .nan\n",
        "a: .inf\n",
        "1: a\n",
        "? [a, b]\n: 1\n",
        "null: a\n",
        "a: &x {b: 1}\nc:\n  <<: *x\n",
    ],
)
def test_refused_kinds_of_values(text):
    refused(text)


def test_aliases_are_allowed_in_moderation():
    assert parse_document("a: &x [1, 2]\nb: *x\n", "s.yaml").data == {"a": [1, 2], "b": [1, 2]}


def test_alias_bomb_is_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    start = time.perf_counter()
    assert "aliases expand" in str(refused("\n".join(lines)))
    assert time.perf_counter() - start < 2


def test_a_value_that_holds_itself():
    assert "nest without end" in str(refused("a: &a [*a]\n"))
    assert "nest without end" in str(refused("a: &a {b: *a}\n"))


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting(opening):
    assert "nested deeper" in str(refused("a:\n " + opening * 50_000))


def test_binary_file(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\x7fELF\x02\x01\x01\x00\x00")
    with pytest.raises(SpecError, match="binary"):
        read_document(path)


def test_other_encodings(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"name: a\nwhat: caf\xe9\n")
    with pytest.raises(SpecError, match="not UTF-8") as caught:
        read_document(path)
    assert where(caught.value) == (2, 10)


def test_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\n")
    assert read_document(path).data == {"name": "a"}


def test_huge_file(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("a: 1\n" + "#" * (1 << 20))
    with pytest.raises(SpecError, match="larger than"):
        read_document(path)


def test_unreadable(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_document(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        read_document(tmp_path / "missing.yaml")


def test_merge_keeps_places_of_both_files():
    base = parse_document("a: {b: 1, c: [1, 2]}\nd: 5\n", "base.yaml")
    top = parse_document("\na:\n  c: [3]\n  e: {f: 1}\n", "top.yaml")
    merged = top.over(base)
    assert merged.data == {"a": {"b": 1, "c": [3], "e": {"f": 1}}, "d": 5}
    assert str(merged.place(("a", "b"))) == "base.yaml:1:8"
    assert str(merged.place(("a", "c", 0))) == "top.yaml:3:7"
    assert str(merged.place(("a", "e", "f"))) == "top.yaml:4:10"
    assert str(merged.key_place(("d",))) == "base.yaml:2:1"
