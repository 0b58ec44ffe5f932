"""Counting in a listing of machine code, against listings written by hand."""

from __future__ import annotations

import pytest

from flintc.codegen.sass import _INSTRUCTION, Sass, disassemble, resource_usage
from flintc.errors import VerificationError

LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.64 R6, desc[UR4][R4.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64] ;
        /*0040*/                   ACQBULK ;
.L_x_0:
        /*0050*/             @!UP1 LDG.E.U8 R6, desc[UR4][R4.64] ;
        /*0060*/               @P1 LDG.E R6, desc[UR4][R4.64] ;
        /*0070*/                   PREEXIT ;
        /*0080*/                   STL.64 [R1], R2 ;
        /*0090*/                   LDL R2, [R1] ;
        /*10a0*/                   LDG.E.U16.CONSTANT R6, desc[UR4][R4.64] ;
        /*10b0*/                   EXIT ;
"""


def test_counts() -> None:
    sass = Sass(LISTING, tuple(_INSTRUCTION.findall(LISTING)))
    assert len(sass.opcodes) == 12
    assert (sass.waits, sass.triggers, sass.local_accesses) == (1, 1, 2)
    assert sass.before_wait == ("LDC", "LDG.E.128.CONSTANT", "LDG.E.64", "LDGSTS.E.BYPASS.128")
    assert sass.load_widths() == {128: 1, 64: 1, 8: 1, 32: 1, 16: 1}
    assert (sass.count("LDG"), sass.count("LDGSTS")) == (5, 1)


@pytest.mark.parametrize("inspect", [disassemble, resource_usage])
def test_not_a_cubin(inspect: object) -> None:
    with pytest.raises(VerificationError):
        inspect(b"not a cubin")  # type: ignore[operator]
