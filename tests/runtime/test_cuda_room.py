"""Kernels of which some programs wait for others: where a GPU has no room for the others, they are refused."""

import pytest

from flintc.codegen.families.attention import WAITING
from flintc.errors import BackendError
from flintc.runtime.cuda.driver import check_room


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
