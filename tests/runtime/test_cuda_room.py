"""Room on a GPU: one multiprocessor for each of the programs that are to lie apart."""

import pytest

from flintc.runtime.cuda.driver import LoadedKernel, Room

#: As an H200 has it.
ROOM = Room(132, 233_472 // 2)


def loaded(apart, shared_bytes=4096):
    return LoadedKernel("k", None, None, 8, shared_bytes, True, 2, ROOM, apart)


@pytest.mark.parametrize(("programs", "apart"), [(1, True), (132, True), (133, False), (1024, False)])
def test_programs_lie_apart_where_there_is_a_multiprocessor_for_each(programs, apart):
    assert loaded(True).shared_of(programs) == (ROOM.alone if apart else 4096)
    assert loaded(False).shared_of(programs) == 4096
    assert loaded(True, 200_000).shared_of(programs) == 200_000


def test_what_keeps_programs_apart_fits_a_block_once():
    """A block may have all but a KiB of a multiprocessor's shared memory, and takes a KiB besides what it asks for."""
    assert 2 * (ROOM.alone + 1024) > 233_472
    assert ROOM.alone <= 233_472 - 1024
