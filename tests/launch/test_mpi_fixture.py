import re
import shlex
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev") / "shm"

SAY_RANKS = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
print(comm.rank, comm.size, comm.allreduce(1))
"""
SAY_RANKS_AND_HOST = """
import socket
from mpi4py import MPI
print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.allreduce(1), socket.gethostname())
"""
FIND_PACKAGES = """
from importlib.util import find_spec
print(find_spec("distman").origin, find_spec("pytest").origin)
"""
FIND_MPI4PY = """
import importlib.util
print(importlib.util.find_spec("mpi4py"))
import mpi4py
"""


def test_ranks_agree_with_mpi4py(any_mpi):
    assert any_mpi.run("-c", SAY_RANKS, ranks=3).lines == ["0 3 3", "1 3 3", "2 3 3"]


def test_ranks_see_the_main_environment_and_this_repository(any_mpi):
    (line,) = any_mpi.run("-c", FIND_PACKAGES, ranks=1).lines
    distman = Path(__file__).parents[2] / "distman" / "__init__.py"
    assert line == f"{distman} {pytest.__file__}"


def test_mpi4py_can_be_hidden(any_mpi):
    finished = any_mpi.run("-c", FIND_MPI4PY, ranks=1, mpi4py=False)
    assert finished.stdout == "None\n"
    assert "ModuleNotFoundError" in finished.stderr


def test_several_hosts(any_mpi, namespace_hosts):
    finished = any_mpi.run_on(namespace_hosts, "-c", SAY_RANKS_AND_HOST, ranks_per_host=2)
    assert finished.lines == ["0 4 n1", "1 4 n1", "2 4 n2", "3 4 n2"]


def test_mpirun_in_a_batch_job(any_mpi, slurm_cluster):
    command = shlex.join(any_mpi.batch_command("-c", SAY_RANKS_AND_HOST, ranks=4))
    job = slurm_cluster.sbatch(f"#!/bin/bash\n{command}\n", "-N2", "-n4", "--ntasks-per-node=2")
    assert job.lines == ["0 4 n1", "1 4 n1", "2 4 n2", "3 4 n2"]


def test_a_killed_rank_leaves_no_shared_memory(any_mpi):
    before = shared_memory_of_mpi()
    killed = any_mpi.run("-c", f"{SAY_RANKS}\nimport os\nos.kill(os.getpid(), 9)", ranks=2)
    assert killed.returncode != 0
    assert shared_memory_of_mpi() <= before


def shared_memory_of_mpi():
    """Those segments that an MPI has named; other tests have theirs in the same place, and remove them meanwhile."""
    return {path for path in SHARED_MEMORY.iterdir() if re.search("mpi|vader|sm_segment", path.name, re.IGNORECASE)}
