"""The lint on listings written by hand: control flow, where addresses come from, what cannot be told."""

from __future__ import annotations

import pytest

from flintc.codegen.lint import lint
from flintc.codegen.ptx import Ptx, parse_ptx
from flintc.codegen.sass_flow import SassFlow, parse_sass
from flintc.errors import VerificationError
from flintc.ir.plan import CompiledKernel, Effect, Kernel, Param

POINTERS = ("x_ptr", "w_ptr", "y_ptr")
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
LOADED = "".join(f"ld.param.b64 %rd{i}, [k_param_{i}];\n" for i in range(3))
LOAD_X, LOAD_W = "ld.global.b32 { %r1 }, [ %rd0 + 0 ];", "ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd1 + 16 ];"
STORE_Y = "@%p1 st.global.b32 [ %rd2 + 0 ], { %r1 };"


def ptx(body: str) -> Ptx:
    entry = f".version 8.7\n.visible .entry k(\n\t.param .u64 k_param_0\n)\n.reqntid 128\n{{\n{LOADED}{body}\n}}\n"
    return parse_ptx("k", entry, POINTERS)


def at(listing: Ptx) -> list[tuple[str, str, list[int]]]:
    return [(a.kind, a.param, sorted(listing.waited[a.index])) for a in listing.accesses]


def test_straight_code() -> None:
    listing = ptx("\n".join([TRIGGER, LOAD_W, WAIT, LOAD_X, STORE_Y, "ret;"]))
    assert at(listing) == [("read", "w_ptr", [0]), ("read", "x_ptr", [1]), ("write", "y_ptr", [1])]
    assert listing.waited_at_end == {1} and [sorted(listing.waited[i]) for i in listing.triggers] == [[0]]


def test_a_wait_on_one_side_of_a_branch() -> None:
    around = f"@%p1 bra $L__BB0_1;\n{WAIT}\n$L__BB0_1:\n{LOAD_X}\nret;"
    assert ptx(around).waited_at_end == {0, 1} and at(ptx(around)) == [("read", "x_ptr", [0, 1])]
    both = f"@%p1 bra $L__BB0_1;\n{WAIT}\nbra.uni $L__BB0_2;\n$L__BB0_1:\n{WAIT}\n$L__BB0_2:\n{LOAD_X}\nret;"
    assert ptx(both).waited_at_end == {1}


def test_a_wait_in_a_loop() -> None:
    assert ptx(f"$L__BB0_1:\n{WAIT}\n@%p1 bra $L__BB0_1;\nret;").waited_at_end == {1, 2}


def test_a_conditional_return_before_the_wait() -> None:
    assert ptx(f"@%p1 ret;\n{WAIT}\nret;").waited_at_end == {0, 1}


def test_addresses_are_followed() -> None:
    body = """
mul.wide.s32 %rd10, %r1, 4;
add.s64 %rd11, %rd1, %rd10;
mov.b64 %rd12, %rd11;
$L__BB0_1:
add.s64 %rd12, %rd12, 64;
selp.b64 %rd13, %rd12, %rd2, %p1;
ld.global.b32 { %r1 }, [ %rd13 + 0 ];
@%p1 bra $L__BB0_1;
ret;
"""
    assert {(a.kind, a.param) for a in ptx(body).accesses} == {("read", "w_ptr"), ("read", "y_ptr")}


def test_kinds_of_access() -> None:
    body = """
cp.async.cg.shared.global [ %r9 + 0 ], [ %rd0 + 0 ], 0x10, %r8;
{ .reg .pred p; setp.ne.s32 p, %r1, 0; @p prefetch.global.L2 [%rd1]; mov.u32 %r2, 0; }
@%p2 atom.global.gpu.acq_rel.add.u32 %r3, [ %rd2 + 0 ], %r4;
@%p2 ld.global.gpu.acquire.b32 %r3, [ %rd2 + 0 ];
ld.shared.b32 %r5, [%r6+128];
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r7];
ret;
"""
    assert [(a.kind, a.param) for a in ptx(body).accesses] == [
        ("read", "x_ptr"),
        ("hint", "w_ptr"),
        ("arrive", "y_ptr"),
        ("arrive", "y_ptr"),
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ld.b32 %r1, [%rd0];", "cannot tell what ld.b32 touches"),
        ("cp.async.bulk.shared::cluster.global [%r1], [%rd0], 16, [%r2];", "cannot tell what cp.async.bulk"),
        ("ld.global.b32 %r1, [%rd9];", "cannot tell which parameter"),
        ("call (retval0), f, (param0);", "cannot tell where call"),
        ("???;", "cannot read its PTX"),
    ],
)
def test_what_cannot_be_told_is_refused(body: str, said: str) -> None:
    with pytest.raises(VerificationError, match=said.replace("(", r"\(")):
        listing = ptx(body + "\nret;")
        assert listing.accesses is listing.waited_at_end  # reaching for both is the point


def test_no_entry() -> None:
    with pytest.raises(VerificationError, match="holds no entry"):
        parse_ptx("k", ".version 8.7\n", ())


def kernel(*path: Effect, waits: bool = True) -> Kernel:
    return Kernel("k", "", tuple(Param(n, "*bf16") for n in POINTERS), {}, 4, 1, waits, paths=(path,))


READ_X, READ_W, WRITE_Y = Effect("read", "x_ptr"), Effect("read", "w_ptr"), Effect("write", "y_ptr")
KERNEL = kernel(Effect("trigger"), READ_W, Effect("wait"), READ_X, WRITE_Y)


def findings(*statements: str, stated: Kernel = KERNEL) -> list[str]:
    entry = f".visible .entry k()\n{{\n{LOADED}" + "\n".join([*statements, "ret;"]) + "\n}\n"
    compiled = CompiledKernel("k", "sm_90", "k", POINTERS, 4, 0, 32, 0, 0, b"", entry)
    return lint(stated, compiled, machine_code=False)


def test_code_as_stated() -> None:
    assert findings(TRIGGER, LOAD_W, WAIT, LOAD_X, STORE_Y) == []


def test_a_load_below_the_wait_may_stand_above_in_the_source() -> None:
    assert findings(TRIGGER, WAIT, LOAD_W, LOAD_X, STORE_Y) == []


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ((TRIGGER, LOAD_W, LOAD_X, WAIT, STORE_Y), "a read through x_ptr above the wait, which its source does not"),
        ((TRIGGER, LOAD_W, STORE_Y, WAIT, LOAD_X), "a write through y_ptr above the wait"),
        ((TRIGGER, LOAD_W, LOAD_X, STORE_Y), "it waits not at all, not exactly once"),
        ((TRIGGER, WAIT, LOAD_W, WAIT, LOAD_X, STORE_Y), "it waits more than once"),
        ((TRIGGER, "@%p1 bra $L1;", WAIT, "$L1:", LOAD_W, LOAD_X, STORE_Y), "it waits not at all or once"),
        ((TRIGGER, LOAD_W, WAIT, LOAD_X), "lacks the write through y_ptr"),
        ((LOAD_W, WAIT, LOAD_X, STORE_Y), "lost the trigger"),
        ((TRIGGER, WAIT, LOAD_X, STORE_Y, "st.global.b32 [%rd1], %r1;"), "a write through w_ptr below the wait"),
        ((TRIGGER, WAIT, "ld.global.nc.b32 %r1, [%rd0];", STORE_Y), "through x_ptr below the wait past the coherent"),
    ],
)
def test_code_that_differs(statements: tuple[str, ...], said: str) -> None:
    assert any(said in message for message in findings(*statements)), findings(*statements)


def test_a_wait_without_the_attribute() -> None:
    plain = kernel(READ_X, WRITE_Y, waits=False)
    assert findings(LOAD_X, STORE_Y, stated=plain) == []
    assert "without the attribute" in findings(WAIT, LOAD_X, STORE_Y, stated=plain)[0]


def test_a_trigger_that_moved_up() -> None:
    late = kernel(Effect("wait"), Effect("trigger"), READ_X, WRITE_Y)
    assert findings(WAIT, TRIGGER, LOAD_X, STORE_Y, stated=late) == []
    assert "lets the next launch start above the wait" in findings(TRIGGER, WAIT, LOAD_X, STORE_Y, stated=late)[0]


def sass(*lines: str, target: str = "sm_90") -> SassFlow:
    text = "\n".join(x if x.startswith(".L") else f"        /*{16 * i:04x}*/   {x} ;" for i, x in enumerate(lines))
    return parse_sass("k", text, [("x_ptr", "*bf16"), ("n", "i32"), ("w_ptr", "*bf16"), ("y_ptr", "*bf16")], target)


def test_machine_code_above_the_wait() -> None:
    code = sass(
        "LDC.64 R2, c[0x0][0x220]",
        "S2R R4, SR_TID.X",
        "IMAD.WIDE.U32 R2, R4, 0x2, R2",
        "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
        "ACQBULK",
        "ULDC.64 UR6, c[0x0][0x210]",
        "LDG.E R9, desc[UR4][R6.64]",
        "STG.E desc[UR4][R10.64], R9",
        "EXIT",
    )
    assert code.loads_above() == {"w_ptr": 1} and code.stores_above() == [] and code.waited_at_end == {1}


def test_where_machine_code_triggers() -> None:
    early, late = sass("PREEXIT", "ACQBULK", "EXIT"), sass("ACQBULK", "PREEXIT", "EXIT")
    assert [[set(x.waited[i]) for i in x.triggers] for x in (early, late)] == [[{0}], [{1}]]


def test_uniform_registers_carry_chains_and_reuse() -> None:
    code = sass(
        "ULDC.64 UR8, c[0x0][0x210]",
        "IADD3 R2, P1, P2, R8, UR8, R3",
        "IADD3.X R3, R7, UR9, R6, P1, P2",
        "LDG.E R2, desc[UR4][R2.64]",  # its own address register now holds data
        "LDC.64 R4, c[0x0][0x228]",
        "LEA R4, P0, R2, R4, 0x2",
        "LDG.E R5, desc[UR4][R4.64]",
        "ACQBULK",
        "EXIT",
    )
    assert set(code.loads_above()) == {"x_ptr", "y_ptr"}


def test_machine_code_hoisted_in_a_loop() -> None:
    code = sass(
        "LDC.64 R2, c[0x0][0x210]",
        ".L_x_0:",
        "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]",
        "ACQBULK",
        "@P0 BRA `(.L_x_0)",
        "STG.E desc[UR4][R2.64], R9",
        "EXIT",
    )
    assert set(code.loads_above()) == {"x_ptr"} and code.waited_at_end == {1, 2}


def test_machine_code_around_a_wait() -> None:
    code = sass("@P0 BRA P1, `(.L_x_0)", "ACQBULK", ".L_x_0:", "STG.E desc[UR4][R2.64], R9", "EXIT")
    assert code.waited_at_end == {0, 1} and code.stores_above() == ["STG.E"]
    assert sass("@P0 EXIT", "ACQBULK", "EXIT").waited_at_end == {0, 1}


def test_a_predicated_write_may_leave_what_was_there() -> None:
    code = sass(
        "LDC.64 R2, c[0x0][0x210]",
        "@P0 LDC.64 R2, c[0x0][0x220]",
        "LDG.E R4, desc[UR4][R2.64]",
        "ACQBULK",
        "EXIT",
    )
    assert set(code.loads_above()) == {"x_ptr", "w_ptr"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("LDG.E R4, desc[UR4][R2.64]", "cannot tell what R4, desc"),
        ("UBLKCP.S.G [UR4], [UR6], UR8", "cannot tell what UBLKCP"),
        ("BRX R2 -0x40", "cannot tell where BRX"),
    ],
)
def test_machine_code_that_cannot_be_told(line: str, said: str) -> None:
    with pytest.raises(VerificationError, match=said):
        sass(line, "ACQBULK", "EXIT").loads_above()


def test_an_unknown_target() -> None:
    with pytest.raises(VerificationError, match="no machine code of a known target"):
        sass("EXIT", target="sm_50")
