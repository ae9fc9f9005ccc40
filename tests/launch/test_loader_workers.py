"""Workers of data loaders when a scheduler signals every process of a job, and when their rank dies."""

import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from . import preloaded
from .preloaded import PYTHON
from .processes import marked, poll, start

STOPPED = Path(__file__).parent / "scripts" / "stopped.py"
LIMIT = 60


def all_processes():
    return [one for one in marked() if STOPPED.name in one.command]


@pytest.fixture
def training(free_port, tmp_path):
    """Start two ranks with two workers each."""
    with ExitStack() as stack:

        def begin(kind):
            command = [PYTHON, STOPPED, tmp_path, kind]
            job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
            ranks = [stack.enter_context(start(command, env={"RANK": str(rank), **job})) for rank in range(2)]
            for rank in ranks:
                rank.wait_for_output("ready", timeout=LIMIT)
            return ranks

        yield begin


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["torch", "distman", "stream"])
def test_a_signal_to_all_processes_stops_a_training_that_saves(training, tmp_path, kind, seed):
    ranks = training(kind)
    rng = random.Random(f"{kind} {seed}")  # noqa: S311 - it draws no secrets
    number = rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    found = all_processes()
    assert len(found) == 6
    for process in rng.sample(found, 6):
        process.send(number)
    finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [(one.returncode, one.stderr) for one in finished] == [(os.EX_TEMPFAIL, "")] * 2
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] > 0
    assert poll(lambda: not all_processes(), 5)


def test_workers_end_with_their_rank(training):
    ranks = training("torch")
    os.kill(ranks[0].pid, signal.SIGKILL)
    assert ranks[1].wait(timeout=LIMIT).returncode == 76
    assert poll(lambda: not all_processes(), 5)


@pytest.mark.parametrize("kind", ["torch", "distman"])
def test_a_preempted_job_of_slurm_saves_though_its_workers_are_signalled_too(slurm_cluster, tmp_path, kind):
    def preempt(job):
        job.wait_for_output("ready", times=2, timeout=LIMIT)
        job.cancel("--signal=TERM")

    script = f"#!/bin/sh\nexec srun {PYTHON} {STOPPED} {tmp_path} {kind}\n"
    finished = slurm_cluster.sbatch(script, "-N2", "-n2", env=preloaded.variables(), timeout=LIMIT, meanwhile=preempt)
    assert "DataLoader worker" not in finished.stderr
    assert finished.returncode == os.EX_TEMPFAIL
    assert (tmp_path / "state.pt").exists()
