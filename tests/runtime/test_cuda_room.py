"""Room on a GPU: for programs that others wait for, and one multiprocessor for each of those that are to lie apart."""

import pytest

from flintc.codegen.families.attention import WAITING
from flintc.errors import BackendError
from flintc.runtime.cuda.driver import LoadedKernel, Room, check_room


def test_room_for_one_that_waits_for_nobody_is_enough():
    check_room("attention_full", 96, 97)


@pytest.mark.parametrize("room", [96, 32])
def test_a_kernel_that_could_fill_the_gpu_with_programs_that_wait_is_refused(room):
    with pytest.raises(BackendError, match=f"up to 96 programs of kernel attention_full .* {room} at once") as told:
        check_room("attention_full", 96, room)
    assert told.value.remedy


def test_the_targets_have_room_with_one_program_a_multiprocessor():
    for multiprocessors in (132, 148):
        check_room("attention_full", WAITING, multiprocessors)


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
