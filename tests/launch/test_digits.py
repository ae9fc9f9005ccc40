"""The example on real data, unchanged under every launcher: accuracy, the same weights on all ranks, no noise.

Under `sbatch`, torchrun started by `srun`, and on several hosts: see `test_job_scripts`.
"""

import re
import shlex
from pathlib import Path

import pytest

from .mpi import without_words_of_prrte
from .preloaded import PYTHON
from .processes import launch

DIGITS = Path(__file__).parents[2] / "docs" / "examples" / "digits.py"
LIMIT = 120


def assert_learned(finished, *, ranks, nodes=1, method):
    assert finished.returncode == 0
    assert without_words_of_prrte(finished.stderr) == ""
    result = re.search(r"test accuracy ([\d.]+), weights \w+ on all (\d+) ranks", finished.stdout)
    assert result, "rank 0 prints the result"
    assert float(result[1]) >= 0.97
    assert int(result[2]) == ranks
    assert f"rank 0 of {ranks}," in finished.stdout
    assert f"node 0 of {nodes}," in finished.stdout
    assert f", {method})" in finished.stdout
    assert len(re.findall(r"^epoch ", finished.stdout, re.MULTILINE)) == 6


def test_plain_python():
    assert_learned(launch([PYTHON, DIGITS], timeout=LIMIT), ranks=1, method="single")


def test_torchrun(torchrun):
    finished = torchrun.run(DIGITS, ranks=2, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT)
    assert_learned(finished, ranks=2, method="torchrun")


@pytest.mark.parametrize("mpi4py", [True, False], ids=["with mpi4py", "without mpi4py"])
@pytest.mark.parametrize("name", ["openmpi", "mpich", "intel_mpi"])
def test_mpi_on_one_host(request, name, mpi4py):
    mpi = request.getfixturevalue(name)
    finished = mpi.run(DIGITS, ranks=2, mpi4py=mpi4py, timeout=LIMIT)
    assert_learned(finished, ranks=2, method="openmpi" if name == "openmpi" else "hydra")


@pytest.mark.parametrize("name", ["mpich", "intel_mpi"])  # the page about MPI submits one of Open MPI
def test_mpirun_inside_sbatch(request, slurm_cluster, name):
    mpi = request.getfixturevalue(name)
    command = shlex.join(mpi.batch_command(DIGITS, ranks=4))
    options = ("-N2", "-n4", "--ntasks-per-node=2")
    finished = slurm_cluster.sbatch(f"#!/bin/bash\n{command}\n", *options, timeout=LIMIT)
    assert_learned(finished, ranks=4, nodes=2, method="hydra")


def test_mpi_over_two_hosts_without_an_address(mpich, namespace_hosts):
    finished = mpich.run_on(namespace_hosts, DIGITS, ranks_per_host=1, timeout=LIMIT)
    assert_learned(finished, ranks=2, nodes=2, method="hydra")
