"""The job scripts of launchers/, unchanged, wherever a launcher of theirs runs here; and one that is preempted."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from distman._cli.launch.job_script import JobRequest, render

from . import preloaded
from .conftest import require_namespaces, require_programs
from .mpi import without_words_of_prrte
from .processes import start
from .slurm import PROGRAMS, SlurmCluster

REPOSITORY = Path(__file__).parents[2]
LAUNCHERS = REPOSITORY / "launchers"
DIGITS = REPOSITORY / "docs" / "examples" / "digits.py"
SCRIPTS = Path(__file__).parent / "scripts"
RANKS = SCRIPTS / "ranks.py"
WATCHED = SCRIPTS / "watched.py"
LIMIT = 180
SAY_ARGUMENTS = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
ARGUMENTS = ["--name=a b", "it's", '"$HOME" `id` $(id)', "-x", "--", "*", "", "two\n#SBATCH --nodes=9", "ä;&|<>\\"]


@pytest.fixture(scope="module")
def large_cluster():
    """Four nodes, n1 to n4, with 32 CPUs and four GPUs called a100 each, as the scripts ask for."""
    require_programs(*PROGRAMS)
    require_namespaces()
    with SlurmCluster(cpus_per_node=32, gpu_type="a100") as cluster:
        yield cluster


@pytest.fixture
def cluster(large_cluster):
    yield large_cluster
    large_cluster.cancel_jobs()


def folder_with(train, folder):
    """Return the folder with a train.py."""
    (folder / "train.py").symlink_to(train)
    return folder


def assert_started(finished, *, ranks, nodes, method, has_secret):
    assert finished.returncode == 0
    found = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    per_node = ranks // nodes
    places = [(rank, f"n{1 + rank // per_node}", rank % per_node, ranks, method) for rank in range(ranks)]
    names = ("rank", "host", "local_rank", "world_size", "launcher")
    assert sorted(tuple(rank[name] for name in names) for rank in found) == places
    (secret,) = {rank["secret"] for rank in found}
    assert bool(secret) is has_secret
    assert not any(rank["is_shown"] for rank in found)


def assert_learned(finished, *, ranks, nodes, method):
    assert finished.returncode == 0
    result = re.search(r"test accuracy ([\d.]+), weights \w+ on all (\d+) ranks", finished.stdout)
    assert result, "rank 0 prints the result"
    assert float(result[1]) >= 0.97
    assert int(result[2]) == ranks
    assert f"rank 0 of {ranks}, local rank 0 of {ranks // nodes} on n1, node 0 of {nodes}," in finished.stdout
    assert f", {method})" in finished.stdout
    assert len(re.findall(r"^epoch ", finished.stdout, re.MULTILINE)) == 6


@pytest.mark.parametrize(
    ("name", "ranks", "nodes"),
    [("slurm_one_node", 4, 1), ("slurm_one_gpu_per_node", 4, 4), ("slurm_many_nodes", 8, 2)],
)
@pytest.mark.parametrize(("ending", "method"), [("", "slurm"), ("_torchrun", "torchrun")], ids=["srun", "torchrun"])
def test_slurm(cluster, tmp_path, name, ending, method, ranks, nodes):
    jobs = []
    script = (LAUNCHERS / f"{name}{ending}.sh").read_text()
    folder = folder_with(RANKS, tmp_path)
    finished = cluster.sbatch(script, env=preloaded.variables(), timeout=LIMIT, cwd=folder, meanwhile=jobs.append)
    assert_started(finished, ranks=ranks, nodes=nodes, method=method, has_secret=method == "torchrun" and nodes > 1)
    assert cluster.wait_for_end(jobs[0].id) == "COMPLETED"
    assert ending or finished.stderr == "", "torchrun may complain at its end that others end too"


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpi_over_two_hosts_without_mpi4py(request, namespace_hosts, tmp_path, name):
    environment = request.getfixturevalue(name).preloaded.environment_on_hosts(mpi4py=False)
    command = ["bash", LAUNCHERS / f"{name}.sh", "n1,n2"]
    folder = folder_with(RANKS, tmp_path)
    finished = namespace_hosts.run(command, env=environment, timeout=LIMIT, cwd=folder)
    assert_started(finished, ranks=4, nodes=2, method="openmpi" if name == "openmpi" else "hydra", has_secret=True)
    assert without_words_of_prrte(finished.stderr) == ""


def test_torchrun_on_two_hosts(namespace_hosts, tmp_path):
    folder = folder_with(RANKS, tmp_path)

    def command(node):
        return [*namespace_hosts.enter(f"n{node + 1}", cwd=folder), "bash", LAUNCHERS / "torchrun.sh", "n1", str(node)]

    with ExitStack() as stack:
        variables = {**preloaded.variables(), "HOME": str(tmp_path)}
        nodes = [stack.enter_context(start(command(node), env=variables, cwd=folder)) for node in (0, 1)]
        finished = [node.wait(timeout=LIMIT) for node in nodes]
    assert [node.returncode for node in finished] == [0, 0]
    told = replace(finished[0], stdout="".join(node.stdout for node in finished))
    assert_started(told, ranks=4, nodes=2, method="torchrun", has_secret=False)
    said = "".join(node.stderr for node in finished)  # torch complains of agents that end one after the other
    assert "static rendezvous" not in said, "nobody is warned of a rendezvous that is not static"
    assert (tmp_path / ".distman_secret").stat().st_mode & 0o777 == 0o600


def test_a_preempted_job_is_queued_again_and_goes_on(cluster, tmp_path):
    request = JobRequest(backend="slurm", nodes=2, program=(str(DIGITS), "--folder", "checkpoints"))

    def preempt(job):
        job.wait_for_output("epoch 2/", timeout=LIMIT)
        job.cancel("--signal=TERM")

    finished = cluster.sbatch(
        render(request), env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path, meanwhile=preempt
    )
    assert_learned(finished, ranks=2, nodes=2, method="slurm")
    first, second = finished.stdout.split("asked to stop; saved in")
    assert "epoch 6/6" not in first
    assert "resuming from" in second
    assert "DUE TO JOB REQUEUE" in finished.stderr
    assert "DistmanError" not in finished.stderr


def test_a_preempted_torchrun_waits_until_the_job_is_queued_again(cluster, tmp_path):
    request = JobRequest(backend="slurm", nodes=2, with_torchrun=True, program=(str(WATCHED), "wait_twice"))

    def preempt(job):
        job.wait_for_output("ready", times=2, timeout=LIMIT)
        job.cancel("--signal=TERM")

    finished = cluster.sbatch(
        render(request), env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path, meanwhile=preempt
    )
    assert finished.returncode == 0
    assert sorted(finished.stdout.splitlines()) == [
        f"{rank}: {said}" for rank in (0, 1) for said in ("done in the second run", "ready", "saved")
    ]
    assert "DistmanError" not in finished.stderr


BREAKS_ONE_HOST = """
import os, signal
from distman import DistributedManager

manager = DistributedManager.initialize()
if os.environ["SLURMD_NODENAME"] == "n2":
    os.kill(os.getpid(), signal.SIGKILL)
manager.barrier()
print(f"rank {manager.rank} on {os.environ['SLURMD_NODENAME']}", flush=True)
"""


def test_a_script_with_spare_nodes_goes_on_without_the_host_that_failed(cluster, tmp_path):
    (tmp_path / "train.py").write_text(BREAKS_ONE_HOST)
    request = JobRequest(backend="slurm", nodes=2, gpus_per_node=0, cpus_per_task=1, spare_nodes=1)
    finished = cluster.sbatch(render(request), env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.lines == ["rank 0 on n1", "rank 1 on n3"]
    assert "Left out from now on: n2." in finished.stderr


def test_a_cancelled_job_is_not_queued_again(cluster, tmp_path):
    request = JobRequest(backend="slurm", program=(str(WATCHED), "wait_twice"))
    jobs = []

    def cancel(job):
        jobs.append(job)
        job.wait_for_output("ready", timeout=LIMIT)
        job.cancel()

    finished = cluster.sbatch(render(request), env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path, meanwhile=cancel)
    assert cluster.wait_for_end(jobs[0].id) == "CANCELLED"
    assert finished.stdout.count("ready") == 1
    assert "saved" in finished.stdout


# In one write: all processes of a torchrun share what it writes to.
SAY_GPUS = """import os
os.write(1, f"{os.environ['SLURM_GPUS_PER_NODE']} {os.environ['WORLD_SIZE']}\\n".encode())
"""


def test_gpus_of_a_type_do_not_change_the_number_of_processes(cluster, tmp_path):
    (tmp_path / "say.py").write_text(SAY_GPUS)
    request = JobRequest(backend="slurm", gpus_per_node=3, gpu_type="a100", with_torchrun=True, program=("say.py",))
    finished = cluster.sbatch(render(request), env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path)
    assert finished.lines == ["a100:3 3"] * 3


def test_every_argument_arrives(cluster, tmp_path):
    (tmp_path / "say.py").write_text(SAY_ARGUMENTS)
    program = ("say.py", *ARGUMENTS)
    request = JobRequest(backend="slurm", gpus_per_node=0, tasks_per_node=2, cpus_per_task=1, program=program)
    finished = cluster.sbatch(render(request), env=preloaded.variables(), timeout=LIMIT, cwd=tmp_path)
    assert [json.loads(line) for line in finished.lines] == [ARGUMENTS, ARGUMENTS]
