"""A training that is killed, or asked to stop: the same command goes on, on the same curve, bit for bit."""

import re
import signal
from pathlib import Path

import torch

from .preloaded import PYTHON

DIGITS = Path(__file__).parents[2] / "docs" / "examples" / "digits.py"
EPOCHS = 6
LIMIT = 120
EX_TEMPFAIL = 75


def command(folder):
    return ("-N2", "-n2", PYTHON, DIGITS, f"--epochs={EPOCHS}", f"--folder={folder}")


def ranks_of(cluster):
    """Return the processes of the job's ranks, on all nodes."""
    return [one for one in cluster.hosts.processes() if one.is_python and DIGITS.name in one.command]


def result_of(folder):
    """Return history, weights and optimizer as saved last."""
    state = torch.load(folder / "latest.pt", weights_only=True)
    records = [{name: value for name, value in one.items() if name != "seconds"} for one in state["history"]["records"]]
    return records, state["model"]["module"], state["training"]["optimization"]["optimizers"]["optimizer"]["state"]


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_job_that_is_killed_and_then_asked_to_stop_ends_as_one_that_was_left_alone(slurm_cluster, tmp_path):
    left_alone = slurm_cluster.srun(*command(tmp_path / "left alone"), timeout=LIMIT)
    assert left_alone.returncode == 0
    assert float(re.search(r"test accuracy ([\d.]+)", left_alone.stdout)[1]) >= 0.97

    with slurm_cluster.start_srun(*command(tmp_path / "disturbed")) as killed:
        killed.wait_for_output("epoch 2/", timeout=LIMIT)
        for process in ranks_of(slurm_cluster):
            process.send(signal.SIGKILL)
        assert killed.wait(timeout=LIMIT).returncode == 128 + signal.SIGKILL

    with slurm_cluster.start_srun(*command(tmp_path / "disturbed")) as stopped:
        stopped.wait_for_output("epoch 4/", timeout=LIMIT)
        assert "resuming from" in stopped.stdout
        ranks_of(slurm_cluster)[1].send(signal.SIGTERM)
        finished = stopped.wait(timeout=LIMIT)
    assert finished.returncode == EX_TEMPFAIL
    assert "asked to stop; saved in" in finished.stdout
    assert f"epoch {EPOCHS}/" not in finished.stdout

    resumed = slurm_cluster.srun(*command(tmp_path / "disturbed"), timeout=LIMIT)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    for one, other in zip(result_of(tmp_path / "disturbed"), result_of(tmp_path / "left alone"), strict=True):
        assert_equal(one, other)
