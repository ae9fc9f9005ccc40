"""A rank raises or never comes: everything is gone within seconds, and the cause can be read."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from .preloaded import PYTHON
from .processes import start

SCRIPTS = Path(__file__).parent / "scripts"
RAISE = SCRIPTS / "raise_on.py"
LIMIT = 60


@pytest.mark.parametrize(("when", "failing_rank"), [("before", 0), ("after", 1)])
@pytest.mark.parametrize("mpi", ["openmpi", "mpich", "intel_mpi"])
def test_a_rank_that_raises_ends_a_job_on_two_hosts(request, namespace_hosts, mpi, when, failing_rank):
    """On one host, and under the other launchers, the explorer looks at it."""
    launcher = request.getfixturevalue(mpi).preloaded
    finished = launcher.run_on(namespace_hosts, RAISE, when, failing_rank, ranks_per_host=1, timeout=LIMIT)
    assert f"rank {failing_rank} raises" in finished.stdout
    assert finished.returncode != 0
    assert "Traceback (most recent call last)" in finished.stderr
    assert f"ValueError: boom on rank {failing_rank}" in finished.stderr
    errors = re.findall(r"^(?:\[rank\d+\]: )? *([\w.]+Error: .*)", finished.stderr, re.MULTILINE)
    by_ranks = [error for error in errors if "ChildFailedError" not in error]  # torchrun speaks last
    assert by_ranks[-1].endswith(f"ValueError: boom on rank {failing_rank}")  # of that rank, or of one that was told


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("how", "what"), [("raise", "raised RuntimeError: .*missing0"), ("kill", ".*died")])
def test_a_rank_that_fails_while_it_makes_its_process_group_is_named(free_port, failing, how, what):
    script = SCRIPTS / "fail_at_the_group.py"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(start([PYTHON, script, how, failing], env=bare(rank, 3, free_port)))
            for rank in range(3)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
        pid = ranks[failing].pid
    for survivor in {0, 1, 2} - {failing}:
        assert finished[survivor].returncode in (1, 76)
        assert re.search(rf"rank {failing} \(\S+, pid {pid}\).* {what}", finished[survivor].stderr)


def test_without_a_launcher_that_ends_it(free_port):
    """Bare RANK and WORLD_SIZE: nothing but the ranks themselves ends the job."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(start([PYTHON, RAISE, "before", "2"], env=bare(rank, 3, free_port)))
            for rank in range(3)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in finished] == [76, 76, 1]
    for rank in finished:
        assert rank.stderr.rstrip().endswith("ValueError: boom on rank 2")


def bare(rank, world_size, port, **more):
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port, **more}
    return {name: str(value) for name, value in variables.items()}


def start_ranks(stack, claims, world_size, port, code):
    command = [PYTHON, "-c", code]
    return [stack.enter_context(start(command, env=bare(rank, world_size, port))) for rank in claims]


IMPORT = "from distman import DistributedManager as M"
INITIALIZE = f"{IMPORT}; M.initialize(rendezvous_timeout=8)"
INITIALIZE_SOON = f"{IMPORT}; M.initialize(rendezvous_timeout=3)"  # for ranks that have imported torch already


def test_a_missing_rank_is_named_by_those_that_came(free_port):
    with ExitStack() as stack:
        ranks = start_ranks(stack, [0, 1], 3, free_port, INITIALIZE_SOON)
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    for rank in finished:
        assert rank.returncode == 1
        assert re.search(r"2 of 3 ranks joined unix:@distman/\S+ within 3 s; missing: rank 2", rank.stderr)
        assert f"[address from MASTER_ADDR, port {free_port} from MASTER_PORT]" in rank.stderr


def test_a_task_that_exits_early_is_named_with_its_host(slurm_cluster):
    code = f"import os, sys; os.environ['SLURM_PROCID'] == '2' and sys.exit(0); {INITIALIZE_SOON}"
    finished = slurm_cluster.srun("-N3", "-n3", PYTHON, "-c", code, timeout=LIMIT)
    assert finished.returncode != 0
    told = re.findall(r"RendezvousError: (2 of 3 ranks joined tcp://n1:\d+ within 3 s.*)", finished.stderr)
    assert len(told) == 2
    assert all("missing: rank 2 (expected on n3)" in line for line in told)
    assert all("the first node of SLURM_STEP_NODELIST" in line for line in told)


def test_a_task_that_cannot_prove_that_it_is_one_ends_the_step(slurm_cluster, tmp_path):
    """It cannot tell the others why it fails, who would wait for their time-out."""
    for name, mode in (("secret", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text("0123456789abcdef" * 4)
        (tmp_path / name).chmod(mode)
    code = (
        "import os; from distman import DistributedManager as M; odd = os.environ['SLURM_PROCID'] == '3'; "
        f"os.environ['DISTMAN_SECRET_FILE'] = {str(tmp_path)!r} + ('/open' if odd else '/secret'); "
        "M.initialize(rendezvous_timeout=3600)"
    )
    finished = slurm_cluster.srun("-N2", "-n4", PYTHON, "-c", code, timeout=LIMIT)
    assert finished.returncode != 0
    assert f"{tmp_path}/open must have mode 0600, got 0644" in finished.stderr


def test_two_processes_that_claim_one_rank_are_named_on_all(free_port):
    with ExitStack() as stack:
        ranks = start_ranks(stack, [0, 1, 1], 3, free_port, INITIALIZE)
        finished = [rank.wait(timeout=30) for rank in ranks]
        pids = [rank.pid for rank in ranks[1:]]
    for rank in finished:
        assert rank.returncode == 1
        assert "rank 1 must be one process, got 2" in rank.stderr
        assert all(f"pid {pid} on " in rank.stderr for pid in pids)


def test_mpi_on_two_hosts_without_mpi4py_says_what_to_set(namespace_hosts, mpich):
    finished = mpich.preloaded.run_on(namespace_hosts, "-c", INITIALIZE, ranks_per_host=1, mpi4py=False, timeout=LIMIT)
    assert finished.returncode != 0
    assert "importing mpi4py failed" in finished.stderr
    assert "set MASTER_ADDR to the name of rank 0's node on all ranks" in finished.stderr


def test_torchrun_restarts_on_the_same_store(preloaded_torchrun):
    options = ("--max-restarts=2",)
    finished = preloaded_torchrun.run(SCRIPTS / "restarted.py", ranks=2, options=options, timeout=LIMIT)
    assert finished.returncode == 0
    assert finished.lines == ["rank 0 finished attempt 1 with 2", "rank 1 finished attempt 1 with 2"]


OF_ANOTHER_JOB = """
from distman import DistributedManager, RankFailedError
raise RankFailedError(rank=5, host="other", pid=7, error_type="ValueError", error_text="inner", traceback_text="")
"""


def test_a_rank_that_raises_the_failure_of_another_job_is_the_one_that_is_named(free_port, tmp_path):
    """Such as one that it has run to prepare data."""
    (tmp_path / "prepare.py").write_text(OF_ANOTHER_JOB)
    with ExitStack() as stack:
        waiting = stack.enter_context(start([PYTHON, RAISE, "after", "7"], env=bare(0, 2, free_port)))
        failing = stack.enter_context(start([PYTHON, "prepare.py"], env=bare(1, 2, free_port), cwd=tmp_path))
        assert failing.wait(timeout=LIMIT).returncode == 1
        finished = waiting.wait(timeout=LIMIT)
    assert finished.stderr.endswith("JobFailed: rank 1 (other, pid 7) inner\n")
