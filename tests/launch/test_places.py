"""Where each rank stands, under every way of starting ranks; and jobs that must not disturb each other."""

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from distman._job.meeting.address import bind_listener, derive_ports

from . import preloaded
from .mpi import without_words_of_prrte
from .preloaded import PYTHON
from .processes import start

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = SCRIPTS / "ranks.py"
LIMIT = 60


def places(finished):
    """Return ``(rank, host, node rank, local rank, local world size)`` of every rank."""
    assert finished.returncode == 0
    assert without_words_of_prrte(finished.stderr) == ""
    found = sorted((json.loads(line) for line in finished.lines), key=lambda peer: peer["rank"])
    assert all(peer["world_size"] == len(found) and peer["distributed"] for peer in found)
    return [(p["rank"], p["host"], p["node_rank"], p["local_rank"], p["local_world_size"]) for p in found]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-n1"], [(0, "n1", 0, 0, 1)]),
        (["-N2", "-n3"], [(0, "n1", 0, 0, 2), (1, "n1", 0, 1, 2), (2, "n2", 1, 0, 1)]),
        (["-N2", "-n3", "-m", "cyclic"], [(0, "n1", 0, 0, 2), (1, "n2", 1, 0, 1), (2, "n1", 0, 1, 2)]),
    ],
    ids=["one task", "uneven", "cyclic"],
)
def test_srun(slurm_cluster, options, expected):
    assert places(slurm_cluster.srun(*options, PYTHON, RANKS, timeout=LIMIT)) == expected


def test_srun_with_rank_zero_on_another_node_than_the_first(slurm_cluster, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("n2\nn1\nn1\n")
    options = ["-m", "arbitrary", "-n3"]
    finished = slurm_cluster.srun(*options, PYTHON, RANKS, env={"SLURM_HOSTFILE": str(hosts)}, timeout=LIMIT)
    assert [place[:3] for place in places(finished)] == [(0, "n2", 1), (1, "n1", 0), (2, "n1", 0)]


def test_a_step_on_the_second_node_and_two_steps_at_once(slurm_cluster, tmp_path):
    task = shlex.join([str(PYTHON), str(RANKS)])
    script = f"""#!/bin/bash
srun --exact -N1 -n2 -r1 {task}
srun --exact -N1 -n2 -r0 {task} > first &
srun --exact -N1 -n2 -r0 {task} > second
wait
cat first second
"""
    options = ("-N2", "-n8", "--ntasks-per-node=4")
    finished = slurm_cluster.sbatch(script, *options, env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.stderr == ""
    found = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [peer["host"] for peer in found[:2]] == ["n2", "n2"]
    assert [peer["host"] for peer in found[2:]] == ["n1"] * 4
    assert [sorted(peer["rank"] for peer in found[i : i + 2]) for i in (0, 2, 4)] == [[0, 1]] * 3


def test_the_tasks_of_a_job_array_are_jobs_of_their_own(slurm_cluster, tmp_path):
    task = shlex.join([str(PYTHON), str(RANKS)])
    script = f"#!/bin/bash\nsrun {task} > {tmp_path}/$SLURM_ARRAY_TASK_ID\n"
    assert slurm_cluster.sbatch(script, "--array=1-2", "-n2", env=preloaded.variables(), timeout=LIMIT).returncode == 0
    for task_id in "12":
        found = [json.loads(line) for line in (tmp_path / task_id).read_text().splitlines()]
        assert sorted(peer["rank"] for peer in found) == [0, 1]


PLAIN = "from distman import DistributedManager as M; m = M.initialize(); print(m.world_size, m.distributed)"


@pytest.mark.parametrize("how", ["salloc", "sbatch"])
def test_plain_python_in_an_allocation_is_one_process_that_says_why(slurm_cluster, how):
    if how == "salloc":
        finished = slurm_cluster.salloc("-N2", "-n4", PYTHON, "-c", PLAIN, timeout=LIMIT)
    else:
        script = f"#!/bin/bash\n{shlex.join([str(PYTHON), '-c', PLAIN])}\n"
        finished = slurm_cluster.sbatch(script, "-N2", "-n4", env=preloaded.variables(), timeout=LIMIT)
    assert finished.returncode == 0
    assert finished.stdout.splitlines()[-1] == "1 False"
    assert "(4 tasks on 2 nodes), but srun did not start it" in finished.stderr
    assert "start it with: srun python" in finished.stderr


def test_no_task_of_srun_runs_alone_because_of_variables_from_elsewhere(slurm_cluster):
    lone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    finished = slurm_cluster.srun("-N2", "-n3", PYTHON, "-c", PLAIN, env=lone, timeout=LIMIT)
    assert finished.returncode != 0
    assert finished.stdout == ""
    assert finished.stderr.count("LaunchEnvironmentError: WORLD_SIZE must not be 1 in a task of several") == 3


def test_gpus_of_each_task_are_counted_from_zero(slurm_cluster):
    task = [PYTHON, SCRIPTS / "fake_gpus.py"]
    assert slurm_cluster.srun("-n2", "--gpus-per-task=1", *task, timeout=LIMIT).lines == ["0 cuda:0", "1 cuda:0"]
    assert slurm_cluster.srun("-n2", "--gpus-per-task=2", *task, timeout=LIMIT).lines == ["0 cuda:0", "1 cuda:0"]
    assert slurm_cluster.srun("-n2", "--gpus-per-node=2", *task, timeout=LIMIT).lines == ["0 cuda:0", "1 cuda:1"]


@pytest.mark.parametrize("mpi4py", [True, False], ids=["with mpi4py", "without mpi4py"])
@pytest.mark.parametrize("name", ["openmpi", "mpich", "intel_mpi"])
def test_mpi_on_one_host(request, name, mpi4py):
    finished = request.getfixturevalue(name).preloaded.run(RANKS, ranks=2, mpi4py=mpi4py, timeout=LIMIT)
    assert [place[2:] for place in places(finished)] == [(0, 0, 2), (0, 1, 2)]


@pytest.mark.parametrize("name", ["mpich", "intel_mpi"])  # the page about MPI submits one of Open MPI
def test_mpirun_inside_sbatch(request, slurm_cluster, name):
    command = shlex.join(request.getfixturevalue(name).preloaded.batch_command(RANKS, ranks=4))
    options = ("-N2", "-n4", "--ntasks-per-node=2")
    finished = slurm_cluster.sbatch(f"#!/bin/bash\n{command}\n", *options, timeout=LIMIT)
    assert places(finished) == [(0, "n1", 0, 0, 2), (1, "n1", 0, 1, 2), (2, "n2", 1, 0, 2), (3, "n2", 1, 1, 2)]


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpi_over_two_hosts(request, namespace_hosts, name):
    finished = request.getfixturevalue(name).preloaded.run_on(namespace_hosts, RANKS, ranks_per_host=2, timeout=LIMIT)
    expected = [(0, "n1", 0, 0, 2), (1, "n1", 0, 1, 2), (2, "n2", 1, 0, 2), (3, "n2", 1, 1, 2)]
    assert places(finished) == expected


def test_a_stranger_on_the_first_port_is_passed_by():
    job = {"DISTMAN_JOB_ID": "a job with a stranger", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    first, second = derive_ports(job["DISTMAN_JOB_ID"])[:2]
    with bind_listener("127.0.0.1", first), ExitStack() as stack:
        command = [PYTHON, RANKS]
        ranks = [stack.enter_context(start(command, env={**job, "RANK": str(rank)})) for rank in range(2)]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
        assert [rank.returncode for rank in finished] == [0, 0]
        assert [rank.stderr for rank in finished] == ["", ""]
        assert second != first


def test_jobs_at_the_same_moment_on_one_host(mpich):
    """They could meet; their launchers, the parents, tell them apart."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(mpich.start(RANKS, ranks=2, mpi4py=False)) for _ in range(2)]
        for job in [job.wait(timeout=LIMIT) for job in jobs]:
            assert [place[0] for place in places(job)] == [0, 1]
