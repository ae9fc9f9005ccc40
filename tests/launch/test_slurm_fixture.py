import shlex
import sys

import pytest

from .slurm import SlurmCluster

SAY_RANK_AND_HOST = "import os, socket; print(os.environ['SLURM_PROCID'], socket.gethostname())"


def test_srun_starts_ranks_on_the_nodes(slurm_cluster):
    step = slurm_cluster.srun("-N2", "-n4", "--ntasks-per-node=2", "python", "-c", SAY_RANK_AND_HOST)
    assert step.returncode == 0
    assert step.lines == ["0 n1", "1 n1", "2 n2", "3 n2"]


def test_batch_job_runs_its_steps(slurm_cluster):
    python = shlex.join([sys.executable, "-c", SAY_RANK_AND_HOST])
    job = slurm_cluster.sbatch(f"#!/bin/bash\necho on $(hostname)\nsrun {python}\necho done >&2\n", "-N2", "-n2")
    assert job.returncode == 0
    assert job.lines == ["0 n1", "1 n2", "on n1"]
    assert job.stderr == "done\n"


def test_exit_codes_arrive(slurm_cluster):
    assert slurm_cluster.sbatch("#!/bin/bash\nexit 3\n").returncode == 3
    assert slurm_cluster.srun("sh", "-c", "exit 4").returncode == 4


def test_time_limit_ends_a_step_or_job_and_shows_the_stacks(slurm_cluster):
    hang = [sys.executable, "-c", "import time\ndef stuck_here(): time.sleep(60)\nstuck_here()"]
    with pytest.raises(pytest.fail.Exception, match=r"(?s)waited 4 s.*in stuck_here"):
        slurm_cluster.srun("-N2", *hang, timeout=4)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)waited 4 s.*in stuck_here"):
        slurm_cluster.sbatch(f"#!/bin/bash\nsrun {shlex.join(hang)}\n", "-N2", "-n2", timeout=4)
    assert slurm_cluster.srun("-N4", "--exclusive", "true", timeout=10).returncode == 0


def test_salloc_runs_the_command_outside_any_step(slurm_cluster):
    says = "echo $SLURM_NTASKS ${SLURM_STEP_ID:-no step} $(hostname)"
    assert slurm_cluster.salloc("-n3", "sh", "-c", says).stdout == "3 no step ctl\n"


def test_nodes_have_gpus(slurm_cluster):
    step = slurm_cluster.srun("-n2", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert step.lines == ["0", "1"]


def test_pmix_reaches_two_nodes(slurm_cluster):
    step = slurm_cluster.srun("--mpi=pmix", "-N2", "-n2", "sh", "-c", "echo $PMIX_RANK")
    assert step.lines == ["0", "1"]


def test_job_of_a_killed_srun_is_cancelled(slurm_cluster):
    with slurm_cluster.start_srun("-N4", "--exclusive", "sh", "-c", "echo started; sleep 60") as running:
        running.wait_for_output("started", times=4, timeout=10)
    slurm_cluster.cancel_jobs()
    assert slurm_cluster.srun("-N4", "--exclusive", "true", timeout=10).returncode == 0


def test_two_clusters_live_beside_each_other_and_leave_nothing(slurm_cluster):
    with SlurmCluster(num_nodes=1, gpus_per_node=0) as other:
        step = other.srun("-n2", "hostname")
        assert step.lines == ["n1", "n1"]
        assert slurm_cluster.srun("-N4", "hostname").lines == ["n1", "n2", "n3", "n4"]
        assert other.hosts.processes()
    assert not other.hosts.processes()
    assert not other.directory.exists()
    assert not other.hosts.directory.exists()
