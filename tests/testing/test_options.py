import re

import pytest

SUITE = """
import sys, warnings
import pytest
from distman.testing import ranks

GLOBAL = [1, 2]

@pytest.mark.filterwarnings("default")
@ranks(2)
def test_talks(rank):
    print(f"spoken by {rank}")
    warnings.warn("a word of warning")

@ranks(2, 3)
def test_fails(world_size):
    local = "of the test"
    print("failed of", world_size)
    assert world_size == 2

@ranks(2)
def test_after():
    pass

@ranks(2)
def test_seeded(rank):
    import random
    print("drawn", rank, random.random())

@ranks(2)
def test_skips():
    pytest.skip("for a reason")

@ranks(2)
def test_expects_to_fail():
    pytest.xfail("for another reason")

@pytest.mark.xfail(strict=True)
@ranks(2)
def test_fails_as_marked():
    assert False

@ranks(2)
def test_value_of_conftest(value):
    assert value.doubled() == 4
"""
CONFTEST = """
import pytest

class Value:
    def doubled(self):
        return 4

@pytest.fixture
def value():
    return Value()
"""


@pytest.fixture(scope="module")
def suite(project):
    project.write(CONFTEST, "conftest.py")
    project.write(SUITE)
    return project


@pytest.fixture(scope="module")
def run(suite):
    return suite.run("-rA")


def drawn(text):
    return sorted(set(re.findall(r"drawn \d \S+", text)))


def endings(text):
    return sorted(re.findall(r"^[A-Z]{4,} (?:test_it|\[).*", text, re.MULTILINE))


def test_outcomes(run):
    expected = {"passed": 5, "failed": 1, "skipped": 1, "xfailed": 2}
    assert run.counts().items() >= expected.items(), run.output


def test_ids_and_reasons(run):
    assert "PASSED test_it.py::test_fails[2 ranks]" in run.output
    assert "FAILED test_it.py::test_fails[3 ranks] - Failed: ranks 0, 1, 2 raised AssertionError" in run.output
    assert "SKIPPED [1] test_it.py" in run.output
    assert "for a reason" in run.output
    assert "for another reason" in run.output


def test_warnings_of_workers_are_summarised(run):
    assert "a word of warning" in run.output.partition("= warnings summary =")[2]
    assert "test_it.py:12: UserWarning" in run.output


def test_the_same_in_two_processes_of_pytest_xdist(suite, run):
    parallel = suite.run("-rA", "-n", "2")
    assert parallel.counts() == run.counts(), parallel.output
    assert endings(parallel.output) == endings(run.output)
    assert drawn(parallel.output) == drawn(run.output)
    assert len(drawn(run.output)) == 2
    assert "a word of warning" in parallel.output.partition("= warnings summary =")[2]


def test_last_failed_and_selection_also_under_a_launcher(suite, run):
    assert run.exit_code == 1
    of_launcher = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "RANK": "7", "WORLD_SIZE": "8"}
    again = suite.run("--lf", "--tb=short", "-l", "-x", "-s", **of_launcher)
    assert again.counts() == {"failed": 1}, again.output
    assert "local      = 'of the test'" in again.output
    for rank in range(3):
        assert f"[rank {rank}] failed of 3" in again.output
