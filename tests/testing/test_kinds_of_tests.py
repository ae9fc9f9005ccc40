"""Marks, classes, coroutines and Hypothesis: what strangers combine with @ranks."""

import re

import pytest

SUITE = """
import asyncio
import os
import unittest
from unittest.mock import patch
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies
from distman.testing import ranks


class OwnError(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


class Special(OwnError, OSError):
    pass


@pytest.mark.xfail(raises=ValueError, strict=True)
@ranks(2)
def test_expects_an_error(rank):
    if rank == 1:
        raise UnicodeError("of a type that is a ValueError")
    dist.barrier()


@pytest.mark.xfail(raises=OwnError, strict=True)
@ranks(2)
def test_expects_an_error_of_this_module():
    raise Special("one", "two")


@pytest.mark.xfail(raises=ValueError)
@ranks(2)
def test_expects_another_error():
    raise KeyError("not expected")


@pytest.mark.xfail(raises=ValueError)
@ranks(2)
def test_expects_the_error_of_one_rank(rank):
    raise [ValueError, KeyError][rank]("of one rank")


@pytest.mark.xfail(raises=ValueError)
@ranks(2)
def test_expects_no_death(rank):
    if rank == 0:
        raise ValueError("of the rank that lives")
    import os
    os._exit(3)


class Base:
    @pytest.mark.parametrize("offset", [0, 1])
    def test_inherited(self, rank, offset):
        assert total(rank) == self.expected


@ranks(2)
class TestClass(Base):
    expected = 1

    def test_own(self, world_size):
        assert world_size == 2

    @staticmethod
    def test_static(world_size):
        assert total(1) == world_size

    @ranks(3)
    def test_with_its_own_mark(self, world_size):
        assert world_size == 3

    def check_by_another_name(self):
        assert total(1) == 2

    class TestInner:
        def test_inner(self):
            assert total(1) == 2

    async def test_coroutine(self, rank):
        await asyncio.sleep(0)
        assert total(rank) == self.expected


class TestOfTheBase(Base):
    @pytest.fixture
    def rank(self):
        return 1

    expected = 1


def total(value):
    if not dist.is_initialized():
        return 1  # not on the workers
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


@ranks(2)
def test_skips_in_another_way():
    raise unittest.SkipTest("for another reason")


@ranks(2)
@patch("os.getcwd", return_value="/patched")
def test_patched(getcwd, rank, default=5):
    assert (os.getcwd(), getcwd.called, total(rank), default) == ("/patched", True, 1, 5)


@ranks(2)
async def test_coroutine(rank):
    await asyncio.sleep(0)
    assert total(rank) == 1


@ranks(2)
async def test_coroutine_that_fails(rank):
    await asyncio.sleep(0)
    raise ValueError("in the coroutine")


@ranks(2)
@given(strategies.integers())
def test_draws_below(number):
    pass


@given(strategies.integers())
@ranks(2)
def test_draws_above(number):
    pass


@ranks(2)
def test_skips():
    pytest.skip("for a reason")
"""


@pytest.fixture(scope="module")
def run(project):
    project.write(SUITE)
    return project.run("-rA", "-p", "no:cacheprovider", "-o", "python_functions=test check_")


def endings(run, word):
    return set(re.findall(rf"^{word} test_it\.py::(\S+)\[", run.output, re.MULTILINE))


def test_every_test_ends_as_it_would_in_one_process(run):
    assert endings(run, "XFAIL") == {
        "test_expects_an_error",
        "test_expects_an_error_of_this_module",
    }
    assert endings(run, "FAILED") == {
        "test_expects_another_error",
        "test_expects_the_error_of_one_rank",
        "test_expects_no_death",
        "test_coroutine_that_fails",
        "test_draws_above",
        "test_draws_below",
    }
    assert endings(run, "PASSED") == {
        "TestClass::test_inherited",
        "TestClass::test_own",
        "TestClass::test_static",
        "TestClass::check_by_another_name",
        "TestClass::test_with_its_own_mark",
        "TestClass::TestInner::test_inner",
        "TestClass::test_coroutine",
        "TestOfTheBase::test_inherited",
        "test_patched",
        "test_coroutine",
    }
    assert "TestClass::test_with_its_own_mark[3 ranks]" in run.output
    assert "for a reason" in run.output
    assert "for another reason" in run.output
    assert run.counts()["skipped"] == 2


def test_failures_say_why(run):
    assert "ranks 0, 1 raised ValueError: in the coroutine" in run.report("test_coroutine_that_fails[2 ranks]")
    for name in ("test_draws_above", "test_draws_below"):
        assert "must not stand beside @given" in run.report(f"{name}[2 ranks]")
