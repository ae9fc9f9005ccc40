"""Debuggers and coverage tools, which other plugins know in the pytest process only."""

import json
import subprocess

MEASURED = """
def own_path(rank):
    if rank == 0:
        return "first"
    return "other"

def never():
    return "nowhere"
"""
COVERED = """
import measured
from distman.testing import ranks

@ranks(2)
def test_first(rank):
    assert measured.own_path(rank) == ["first", "other"][rank]

@ranks(3, dies=[2])
def test_after_a_rank_died(rank):
    import os
    if rank == 2:
        os._exit(1)
"""
DEBUGGED = """
import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies
from distman.testing import ranks


def check(secret):
    __tracebackhide__ = True
    assert secret < 0


@ranks(3, timeout=5)
def test_fails(rank):
    secret = 40 + rank
    if rank == 0:
        dist.barrier()
    check(secret)


@ranks(2)
def test_all_fail(rank):
    secret = 60 + rank
    check(secret)


@ranks(2)
@settings(database=None, derandomize=True)
@given(strategies.integers())
def test_example(rank, number):
    assert number < 17


@ranks(2)
def test_passes(rank):
    pass


@pytest.mark.xfail
@ranks(2)
def test_is_expected_to_fail():
    raise ValueError


@ranks(2, timeout=5)
def test_dies(rank):
    if rank == 1:
        import os
        os._exit(3)


@ranks(2)
def test_is_left(rank):
    assert rank == 2


@ranks(2)
def test_is_not_reached():
    pass
"""


def test_lines_that_run_in_the_workers_are_counted(project):
    (project.folder / "measured.py").write_text(MEASURED)
    project.write(COVERED, "test_covered.py")
    run = project.run("-q", "test_covered.py", "--cov=measured", "--cov-report=json", "--cov-branch")
    assert run.counts() == {"passed": 2}, run.output
    lines = json.loads((project.folder / "coverage.json").read_text())["files"]["measured.py"]
    assert lines["missing_lines"] == [8]
    assert lines["missing_branches"] == []
    assert not list(project.folder.glob(".coverage.*")), run.output


def test_the_debugger_stops_where_the_test_failed(project):
    project.write(DEBUGGED, "test_debugged.py")
    typed = "p 'at', rank, secret\nc\n" + "p 'at', rank, secret\nup\ndown\nc\n" + "p 'example', number\nc\n" + "q\n"
    done = subprocess.run(
        project.command("test_debugged.py", "--pdb", "--pdb-rank=2"),
        cwd=project.folder,
        env=project.environ(),
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = done.stdout + done.stderr
    assert "('at', 2, 42)" in output  # ranks 0 and 1 wait
    assert "('at', 0, 60)" in output  # there is no rank 2
    assert "('example', 17)" in output
    assert output.count("entering PDB on rank") == 4
    assert "entering PDB >" not in output  # pytest's own would stop in the plugin
    assert ">       assert number < 17" in output
    assert "Exit: Quitting debugger" in output
    assert "4 failed, 1 passed, 1 xfailed" in output
    assert "Captured stdout" not in output  # the user saw it


LATE = """
import time
from distman.testing import ranks

class Slow(Exception):
    def __str__(self):
        time.sleep(1)
        return "told late"

@ranks(2, timeout=1)
def test_late(rank):
    if rank == 1:
        raise Slow
"""


def test_an_error_that_is_described_after_the_limit_is_debugged_and_told(project):
    project.write(LATE, "test_late.py")
    done = subprocess.run(
        project.command("test_late.py", "--pdb"),
        cwd=project.folder,
        env=project.environ(),
        input="c\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = done.stdout + done.stderr
    assert output.count("entering PDB on rank 1") == 1
    assert "had not ended" not in output
    assert "1 failed" in output
