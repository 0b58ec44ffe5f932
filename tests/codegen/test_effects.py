"""Effects read off hand-written kernels, and the kernels whose effects cannot be told."""

from __future__ import annotations

import pytest

from flintc.codegen.effects import effects_of
from flintc.codegen.render import helpers
from flintc.errors import VerificationError
from flintc.ir.plan import Effect, Param, Path

HELPERS = "\n\n\n".join(
    helpers()[name].source
    for name in (
        "INTERPRET",
        "wait_for_producers",
        "release_dependents",
        "arrive_last",
        "page_of",
        "cache_at",
        "first_of_step",
        "load_earlier",
    )
)
PARAMS = (
    *(Param(f"{n}_ptr", "*bf16") for n in "xwy"),
    *(Param(f"{n}_ptr", "*i32") for n in ("seqs", "table", "count", "more")),
    Param("n", "i32", aligned=False),
)

#: A bound of loads that leave out what the step writes.
BOUND = "first = first_of_step(count_ptr, seqs_ptr, tl.load(seqs_ptr), 8)\n"


def paths(body: str, more: str = "", **constants: int | float | bool) -> tuple[Path, ...]:
    """Paths of a kernel with this body."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").split("\n"))
    names = ", ".join([p.name for p in PARAMS] + [f"{c}: tl.constexpr" for c in constants])
    source = f"import triton\nimport triton.language as tl\n\n{HELPERS}\n\n{more}\n\ndef kernel({names}):\n{lines}\n"
    return effects_of(source, "kernel", PARAMS, constants)


def told(body: str, more: str = "", **constants: int | float | bool) -> list[str]:
    """The effects of a kernel of one path, as words."""
    (path,) = paths(body, more, **constants)
    return [word(e) for e in path]


def word(e: Effect) -> str:
    text = f"{e.kind} {e.param.removesuffix('_ptr')}".strip()
    text += "".join(f" last {c.removesuffix('_ptr')}" for c in e.last)
    return text + "".join(f" if {g.removesuffix('_ptr')}" for g in e.guards) + ("" if e.sure else " perhaps")


def test_above_and_below_the_wait() -> None:
    body = """
release_dependents()
w = tl.load(w_ptr + tl.arange(0, 8))
wait_for_producers()
x = tl.load(x_ptr + tl.program_id(0))
tl.store(y_ptr, w * x)
"""
    assert told(body) == ["trigger", "read w", "wait", "read x", "write y"]


def test_pointers_are_followed_through_arithmetic_names_and_helpers() -> None:
    more = """
def second(base, at, SCALE: tl.constexpr):
    here = base + at * SCALE
    return tl.load(here), here
"""
    body = """
value, where = second(w_ptr, tl.load(x_ptr), SCALE=2)
where += 4
tl.store(tl.where(value > 0, where, y_ptr), value)
"""
    assert told(body, more) == ["read x", "read w", "write w", "write y"]


def test_masks_and_conditions_are_guards() -> None:
    body = """
seq = tl.load(seqs_ptr + tl.program_id(0))
page = page_of(table_ptr, seq, 5, n, seq >= 0, 8, RING=False)
if seq >= 0:
    tl.store(y_ptr + cache_at(page, 0, 0, 5, 1, 8, 4), 1.0)
tl.store(x_ptr, 1.0, mask=seq >= 0)
tl.store(w_ptr + seq, 1.0)
"""
    assert told(body) == ["read seqs", "read table if seqs", "write y if seqs", "write x if seqs", "write w"]


def test_a_loop_over_what_was_loaded_is_guarded_by_it() -> None:
    body = """
count = tl.load(seqs_ptr)
pointer = x_ptr
for i in range(0, count):
    value = tl.load(pointer)
    pointer = w_ptr + i
tl.store(y_ptr, 1.0)
"""
    # The second turn of the loop loads from elsewhere.
    assert told(body) == ["read seqs", "read w if seqs", "read x if seqs", "write y"]


def test_a_loop_is_followed_until_nothing_new_comes() -> None:
    body = """
a, b, c = x_ptr, x_ptr, x_ptr
for i in range(n):
    for j in range(n):
        value = tl.load(a)
        a, b, c = b, c, w_ptr
"""
    assert told(body) == ["read w", "read x"]


def test_who_is_not_last_is_anyone() -> None:
    body = (
        "last = arrive_last(count_ptr, 4)\nif not last:\n    tl.store(x_ptr, 1.0)\nif ~last:\n    tl.store(y_ptr, 1.0)"
    )
    assert told(body)[2:] == ["write x if count", "write y if count"]


def test_the_last_arriver() -> None:
    body = """
tl.store(y_ptr, 1.0)
if arrive_last(count_ptr, 4):
    y = tl.load(y_ptr)
    last = arrive_last(more_ptr, 2)
    if last:
        tl.store(x_ptr, y)
"""
    assert told(body) == [
        "write y",
        "arrive count",
        "reset count if count",
        "read y last count if count",
        "arrive more last count if count",
        "reset more last count if count if more",
        "write x last count last more if count if more",
    ]


def test_after_two_ways_meet_only_what_both_say_is_certain() -> None:
    body = """
last = arrive_last(count_ptr, 4)
if n > 2:
    last = arrive_last(more_ptr, 4)
if last:
    tl.store(x_ptr, 1.0)
"""
    assert {word(path[-1]) for path in paths(body)} == {
        "write x last more if more",
        "write x last count if count",
    }
    inside = "if True:\n    for i in range(2):\n" + "\n".join(f"        {line}" for line in body.strip().split("\n"))
    assert word(paths(inside)[0][-1]).startswith("write x if")


def test_known_conditions_are_decided() -> None:
    body = """
if EVEN:
    tl.store(x_ptr, 1.0)
if not EVEN:
    tl.store(y_ptr, 1.0)
"""
    assert told(body, EVEN=True) == ["write x"]
    assert told(body, EVEN=False) == ["write y"]


def test_paths_split_at_waits_and_returns() -> None:
    body = """
if n > 3:
    wait_for_producers()
    return
w = tl.load(w_ptr)
wait_for_producers()
tl.store(y_ptr, w)
"""
    assert [[word(e) for e in path] for path in paths(body)] == [["wait"], ["read w", "wait", "write y"]]


def test_a_return_before_the_wait_makes_a_path_without_it() -> None:
    assert [[word(e) for e in p] for p in paths("if n > 3:\n    return\nwait_for_producers()")] == [[], ["wait"]]


def test_an_early_return_guards_what_follows() -> None:
    body = "seq = tl.load(seqs_ptr)\nif seq < 0:\n    return\ntl.store(y_ptr, 1.0)"
    assert [word(path[-1]) for path in paths(body)] == ["read seqs", "write y if seqs"]


def test_a_wait_in_a_loop_is_unsure() -> None:
    assert told("for i in range(n):\n    wait_for_producers()") == ["wait perhaps"]


def test_a_wait_under_a_condition_of_a_helper_is_unsure() -> None:
    assert told("perhaps(n)", "def perhaps(n):\n    if n > 2:\n        wait_for_producers()") == ["wait perhaps"]


def test_a_prefetch_is_a_hint() -> None:
    asm = (
        'tl.inline_asm_elementwise("{ .reg .pred p; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [x_ptr + 1])'
    )
    assert told(asm) == ["hint x"]


def test_a_load_that_leaves_out_what_the_step_writes() -> None:
    """Whether it does depends on the rows' sequences and positions; its bound may pass through other helpers."""
    more = "def early(at, first):\n    return load_earlier(at, n, n > 0, first)"
    body = f"{BOUND}x = early(x_ptr + n, first)\ny = tl.load(y_ptr + x)"
    (path,) = paths(body, more)
    assert [word(e) for e in path] == ["read seqs", "read count", "read x if count if seqs", "read y"]
    assert [e.earlier for e in path] == [(), (), ("count_ptr", "seqs_ptr"), ()]


@pytest.mark.parametrize(
    "rows",
    [
        "count_ptr, seqs_ptr, n", "count_ptr, seqs_ptr, tl.load(table_ptr)",
        "tl.where(n > 0, count_ptr, more_ptr), seqs_ptr, seq", "count_ptr, tl.where(n > 0, seqs_ptr, more_ptr), seq",
    ],
)  # fmt: skip
def test_rows_that_are_not_the_sequences_are_refused(rows: str) -> None:
    with pytest.raises(VerificationError, match="cannot tell which rows first_of_step is given, or that the sequence"):
        paths(f"seq = tl.load(seqs_ptr)\nfirst_of_step({rows}, 8)")


@pytest.mark.parametrize(
    "bound",
    ["n", "tl.load(count_ptr)", "first + 1", "-first", "tl.maximum(first, n)", "tl.abs(first)", "first.to(tl.int64)",
     "tl.where(n > 0, first, n)"],
)  # fmt: skip
def test_a_bound_that_is_not_the_steps_is_refused(bound: str) -> None:
    body = f"{BOUND}load_earlier(x_ptr, n, n > 0, {bound})"
    with pytest.raises(VerificationError, match="load_earlier is given another bound than first_of_step returns"):
        paths(body)


def test_a_bound_that_is_the_steps_on_one_way_only_is_refused() -> None:
    body = f"{BOUND}if n > 0:\n    first = n\nload_earlier(x_ptr, n, n > 0, first)"
    with pytest.raises(VerificationError, match="load_earlier is given another bound"):
        paths(body)


def test_arithmetic_in_assembly_touches_nothing() -> None:
    assert told('y = tl.inline_asm_elementwise("add.u32 $0, $1, 1;", "=r,r", [n])') == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("tl.atomic_add(count_ptr, 1)", "tl.atomic_add outside arrive_last"),
        ("arrive_last(tl.where(n > 2, count_ptr, more_ptr), 4)", "cannot tell which counter arrive_last is given"),
        ('tl.inline_asm_elementwise("ld.global.u32 $0, [$1];", "=r,l", [x_ptr])', "otherwise than by a prefetch"),
        ("tl.inline_asm_elementwise(n, '=r,l', [x_ptr])", "otherwise than by a prefetch"),
        ("tl.load(n + 4)", "cannot tell which parameter"),
        ("tl.make_tensor_descriptor(x_ptr, [8], [1], [8])", "cannot tell what tl.make_tensor_descriptor does"),
        ("x_ptr.load()", r"cannot tell what .load\(\) does with a pointer"),
        ("unknown(x_ptr)", "cannot tell what unknown does"),
        ("for i in range(n):\n    return", "a return inside a loop"),
        ("while n > 0:\n    n = n - 1", "a statement While is not understood"),
        ("f = lambda x: x", "an expression Lambda is not understood"),
        ("a, b = tl.load(x_ptr), 1, 2", "3 values for 2 names"),
        ("again(n)", "again calls itself"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_line(body: str, said: str) -> None:
    with pytest.raises(VerificationError, match=r"kernel kernel: line \d+ of its source: .*" + said):
        paths(body, "def again(n):\n    again(n)")


def test_an_entry_that_is_not_there() -> None:
    with pytest.raises(VerificationError, match="no kernel other"):
        effects_of("def kernel():\n    pass\n", "other", (), {})


def test_too_many_paths() -> None:
    body = "\n".join(f"if n > {i}:\n    wait_for_producers()" for i in range(8))
    with pytest.raises(VerificationError, match="more than 64 paths"):
        paths(body)
