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


@pytest.mark.xfail(strict=True)
@ranks(2)
def test_expects_an_error(rank):
    if rank == 1:
        raise ValueError("expected")
    dist.barrier()


@pytest.mark.xfail(raises=ValueError)
@ranks(2)
def test_expects_a_type():
    raise ValueError("of a rank, and here a failure of pytest's own type")


class TestClass:
    expected = 1

    @ranks(2)
    @pytest.mark.parametrize("offset", [0, 1])
    def test_method(self, rank, offset):
        assert total(rank) == self.expected

    @staticmethod
    @ranks(2)
    def test_static(world_size):
        assert total(1) == world_size

    @ranks(3)
    async def test_coroutine(self, world_size):
        await asyncio.sleep(0)
        assert total(1) == world_size == 3


def total(value):
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
    return project.run("-rA", "-p", "no:cacheprovider")


def endings(run, word):
    return set(re.findall(rf"^{word} test_it\.py::(\S+)\[", run.output, re.MULTILINE))


def test_every_test_ends_as_it_would_in_one_process(run):
    assert endings(run, "XFAIL") == {"test_expects_an_error"}
    assert endings(run, "FAILED") == {
        "test_expects_a_type",
        "test_coroutine_that_fails",
        "test_draws_above",
        "test_draws_below",
    }
    assert endings(run, "PASSED") == {
        "TestClass::test_method",
        "TestClass::test_static",
        "TestClass::test_coroutine",
        "test_patched",
        "test_coroutine",
    }
    assert "TestClass::test_coroutine[3 ranks]" in run.output
    assert "for a reason" in run.output
    assert "for another reason" in run.output
    assert run.counts()["skipped"] == 2


def test_failures_say_why(run):
    assert "ranks 0, 1 raised ValueError: in the coroutine" in run.report("test_coroutine_that_fails[2 ranks]")
    for name in ("test_draws_above", "test_draws_below"):
        assert "must not stand beside @given" in run.report(f"{name}[2 ranks]")
