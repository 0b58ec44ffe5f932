"""Type inference refuses what does not fit an op, and fails in no other way."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintc.ir.build import build
from flintc.ir.lower import lower_attention
from flintc.ir.ops import OPS, OpTypeError, infer
from flintc.ir.types import DTYPES, TensorType
from flintc.spec import bind_defaults, load_spec

OTHER = Path(__file__).parents[1] / "data" / "other.yaml"


def examples():
    """One legal (kind, input types, attributes) per kind and rank of inputs, from real graphs."""
    found = {}
    for name in ("tiny-flint", OTHER):
        built = build(bind_defaults(load_spec(name)))
        for graph in (built, lower_attention(built, 16)):
            for op in graph.ops.values():
                types = tuple(graph.values[v].type for v in op.inputs)
                found[op.kind, tuple(len(t.shape) for t in types)] = (op.kind, types, dict(op.attrs))
    return list(found.values())


EXAMPLES = examples()
_dim = st.one_of(st.integers(0, 4), st.sampled_from([16, 32, 128, "B", "2*B", "Q"]))
_attr = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.sampled_from(["bf16", "f32", "softmax", "x"]),
    st.lists(st.integers(-1, 4), max_size=3).map(tuple),
)


def test_every_kind_has_an_example():
    assert {kind for kind, _, _ in EXAMPLES} == set(OPS)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_a_changed_op_is_typed_or_refused(data):
    kind, types, attrs = data.draw(st.sampled_from(EXAMPLES))
    types = list(types)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(types) - 1))
        shape = list(types[at].shape)
        where = data.draw(st.integers(0, len(shape)))
        shape[where : where + data.draw(st.integers(0, 2))] = data.draw(st.lists(_dim, max_size=2))
        types[at] = TensorType(data.draw(st.sampled_from([types[at].dtype, *DTYPES])), tuple(shape))
    for name in data.draw(st.sets(st.sampled_from([*attrs, "novelty"]), max_size=2)):
        attrs = {**attrs, name: data.draw(_attr)}
    for name in data.draw(st.sets(st.sampled_from([*attrs, "novelty"]), max_size=1)):
        attrs = {key: value for key, value in attrs.items() if key != name}
    try:
        made = infer(kind, tuple(types), attrs)
    except OpTypeError:
        return
    assert len(made) == len(OPS[kind].outputs)


@pytest.mark.parametrize(("kind", "types", "attrs"), EXAMPLES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_missing_or_surplus_operand_is_refused(kind, types, attrs):
    with pytest.raises(OpTypeError):
        infer(kind, (*types, types[0], types[0]), attrs)
    with pytest.raises(OpTypeError):
        infer(kind, types[: len(types) - 2], attrs)


def test_attributes_that_an_op_does_not_have():
    x, w = TensorType("bf16", ("B", 16)), TensorType("f32", (16,))
    with pytest.raises(OpTypeError, match="no attribute 'epsilon'"):
        infer("norm", (x, w), {"eps": 1e-6, "epsilon": 1})
    with pytest.raises(OpTypeError, match="needs the attribute 'eps'"):
        infer("norm", (x, w), {})


PARTIAL = (
    TensorType("bf16", ("B", 4, 16)), TensorType("bf16", ("P", 2, 2, 8, 16)),
    *(TensorType("i32", ("B",)) for _ in range(2)), TensorType("i32", ("Q", "T")),
)  # fmt: skip


def merged(splits):
    """Inputs of a merge of so many partials."""
    stat = TensorType("f32", ("B", 4, splits))
    return (TensorType("f32", (*stat.shape, 16)), stat, stat, PARTIAL[2], PARTIAL[3])


@pytest.mark.parametrize(
    ("window", "partials", "said"),
    [
        (13, 3, "it goes without a window, and only so"),
        (None, None, "it goes without a window, and only so"),
        (None, 0, "partials must be positive, not 0"),
        (None, -1, "partials must be positive, not -1"),
        (None, True, "partials must be a whole number, not True"),
        (None, 3.0, "partials must be a whole number, not 3.0"),
    ],
)
def test_partials_that_make_no_sense(window, partials, said):
    """As many under a window as it has chunks; as many over the whole context as the op says."""
    attrs = {"chunk": 8, "window": window, "partials": partials}
    for kind, types, more in (("attention_partial", PARTIAL, {"scale": 1.0}), ("attention_merge", merged(3), {})):
        with pytest.raises(OpTypeError, match=said):
            infer(kind, types, {**attrs, **more})


@pytest.mark.parametrize(
    ("attrs", "splits"),
    [
        ({"chunk": 8, "window": None, "partials": 3}, 3),
        ({"chunk": 8, "window": None, "partials": 2}, 2),
        ({"chunk": 8, "window": 13, "partials": None}, 3),
        ({"chunk": 16, "window": 13, "partials": None}, 2),
    ],
)
def test_a_merge_takes_as_many_partials_as_are_made(attrs, splits):
    o, m, l = infer("attention_partial", PARTIAL, {"scale": 1.0, **attrs})
    assert (o, m, l) == merged(splits)[:3]
    assert infer("attention_merge", merged(splits), attrs) == (TensorType("bf16", ("B", 64)),)
    for other in (splits - 1, splits + 1, "B", f"{splits}*B"):
        with pytest.raises(OpTypeError, match=f"its chunk, window and partials make {splits} splits"):
            infer("attention_merge", merged(other), attrs)
