"""Tests of kernels run twice: in the interpreter, and on the GPU where there is one."""

import launches
import pytest


def pytest_generate_tests(metafunc):
    """Every test of a module that runs kernels."""
    if {"interpret", "load"} & vars(metafunc.module).keys():
        machines = ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)]
        metafunc.parametrize("machine", machines, indirect=True)


@pytest.fixture(autouse=True)
def machine(request):
    """What runs the kernels of the test."""
    launches.MACHINE[0] = getattr(request, "param", "interpreter")
    yield launches.MACHINE[0]
    launches.MACHINE[0] = "interpreter"
