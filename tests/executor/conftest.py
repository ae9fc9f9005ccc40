"""Workers shared by the tests of a run, and scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distman.executor import ParallelExecutor

REPOSITORY = str(Path(__file__).parents[2])


@pytest.fixture(scope="package", autouse=True)
def importable():
    """Let workers that were started afresh import the functions of the tests, however pytest was started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY)
        yield


@pytest.fixture(scope="package")
def resident():
    with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
        yield executor


@pytest.fixture
def pair(resident):
    """An executor of two CPU workers, which must be of use after the test as well."""
    yield resident
    assert resident.run(lambda device: device.type) == ["cpu", "cpu"]


@pytest.fixture
def type_in(tmp_path):
    """Return a function that types a program at ``python -`` in a folder of its own, and returns its output."""

    def run(program, *arguments, **environ):
        done = subprocess.run(
            [sys.executable, "-", *arguments],
            input=program,
            cwd=tmp_path,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    return run
