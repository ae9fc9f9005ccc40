"""A comparison of replicas that a rank does not come to ends on all others, and says which rank that is."""

import pytest

from .preloaded import variables
from .processes import start

LIMIT = 60
PROGRAM = """
import os, signal, torch
from distman import DistributedManager

manager = DistributedManager.initialize()
if manager.rank == 1:
    {instead}
manager.check_replicas(torch.nn.Linear(3, 3))
"""


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 failed (pid {pid}, died of SIGKILL)"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("manager.barrier('elsewhere')", "in check_replicas(), at "),
    ],
)
def test_a_rank_that_does_not_come_is_named(instead, said, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.format(instead=instead))
    with start(["distman", "run", "-n", "3", "train.py"], env=variables(), cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert done.returncode not in (0, None)
    assert said.partition("{pid}")[0] in done.stderr
    assert "exit code 76" in done.stderr
