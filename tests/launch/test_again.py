"""Starting more than once in the same processes."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from .preloaded import PYTHON
from .processes import start

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 60


def bare(rank, port):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def run_bare(port, *command):
    with ExitStack() as stack:
        ranks = [stack.enter_context(start([PYTHON, *command], env=bare(rank, port))) for rank in range(2)]
        return [rank.wait(timeout=LIMIT) for rank in ranks]


@pytest.mark.parametrize("launcher", ["torchrun", "mpich"])
def test_three_times_under_a_launcher(preloaded_torchrun, mpich, launcher):
    run = {"torchrun": preloaded_torchrun.run, "mpich": mpich.preloaded.run}[launcher]
    finished = run(SCRIPTS / "again.py", ranks=2, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT)
    assert finished.returncode == 0
    assert finished.stderr == ""
    assert finished.lines == ["2"] * 6


def test_three_times_at_a_given_port(free_port):
    for rank in run_bare(free_port, SCRIPTS / "again.py"):
        assert (rank.returncode, rank.stdout, rank.stderr) == (0, "2\n2\n2\n", "")


def test_a_start_that_failed_for_a_missing_rank_succeeds_when_it_comes(free_port, tmp_path):
    first, second = run_bare(free_port, SCRIPTS / "late.py", tmp_path / "gave_up")
    assert (first.returncode, first.stdout) == (0, "0 of 2 after 1\n")
    assert (second.returncode, second.stdout) == (0, "1 of 2 after 0\n")
