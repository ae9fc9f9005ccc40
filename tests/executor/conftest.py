"""Workers shared by the tests of a run, and scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distman.executor import ParallelExecutor

from ..launch.preloaded import PYTHON, server_variables
from ..workers.preloaded import fork_servers

REPOSITORY = str(Path(__file__).parents[2])


@pytest.fixture(scope="package", autouse=True)
def servers():
    """Let workers import the functions of the tests, however pytest was started, and their servers be forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY)
        fork_servers(patch)
        yield patch


@pytest.fixture
def fresh_servers(servers):
    """Let servers be new interpreters."""
    servers.undo()
    yield
    servers.syspath_prepend(REPOSITORY)
    fork_servers(servers)


@pytest.fixture(scope="package")
def resident():
    with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
        executor.run(lambda device: device.type)  # what tests measure begins when the preloaded interpreter is there
        yield executor


@pytest.fixture
def pair(resident):
    """An executor of two CPU workers, which must be of use after the test as well."""
    yield resident
    assert resident.run(lambda device: device.type) == ["cpu", "cpu"]


@pytest.fixture
def type_in(tmp_path):
    """Return a function that types a program at ``python -`` in a folder of its own, and returns its output."""
    return lambda program: output_of([sys.executable, "-"], program, tmp_path, os.environ)


@pytest.fixture
def run_program(tmp_path):
    """Return a function that runs a program in a preloaded interpreter, and returns its output."""

    def run(program, **environ):
        return output_of([PYTHON, "-c", program], "", tmp_path, {**os.environ, **server_variables(), **environ})

    return run


def output_of(command, given, folder, environ):
    done = subprocess.run(
        command, input=given, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
