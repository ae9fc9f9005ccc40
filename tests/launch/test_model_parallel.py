"""The example of model times data parallelism: on any grid of ranks, the loss curve of one process."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from .preloaded import PYTHON
from .processes import launch

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "model_parallel.py"
LIMIT = 120
SHORT = ("--epochs", "1")  # the mean over 22 steps, each of which starts from what the one before has learnt


@dataclass(frozen=True)
class Training:
    losses: list[float]
    accuracy: str
    grid: str  # data parallel x model parallel


def read(finished, file):
    assert finished.returncode == 0
    assert finished.stderr == ""
    losses = json.loads(file.read_text())
    epochs = "".join(rf"epoch {epoch}/{len(losses)}  loss {loss:.12f}\n" for epoch, loss in enumerate(losses, start=1))
    printed = re.fullmatch(rf"(\d x \d) ranks: .*\n{epochs}test accuracy ([\d.]+)\n", finished.stdout)
    assert printed, "rank 0 prints grid, losses and accuracy, and no other rank prints"
    return Training(losses, accuracy=printed[2], grid=printed[1])


def assert_same(training, reference, *, grid):
    assert training.grid == grid
    assert training.losses == pytest.approx(reference.losses, rel=1e-6, abs=0)
    assert training.accuracy == reference.accuracy


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    file = tmp_path_factory.mktemp("one_process") / "losses.json"
    return read(launch([PYTHON, EXAMPLE, *SHORT, "--losses", file], timeout=LIMIT), file)


def test_one_process_learns(tmp_path):
    file = tmp_path / "losses.json"
    training = read(launch([PYTHON, EXAMPLE, "--losses", file], timeout=LIMIT), file)
    assert training.grid == "1 x 1"
    assert len(training.losses) == 6
    assert training.losses[-1] < 0.2 * training.losses[0]
    assert float(training.accuracy) >= 0.95


def test_torchrun(preloaded_torchrun, one_process, tmp_path):
    file = tmp_path / "losses.json"
    finished = preloaded_torchrun.run(EXAMPLE, *SHORT, "--losses", file, ranks=3, timeout=LIMIT)
    assert_same(read(finished, file), one_process, grid="3 x 1")


def test_srun_with_a_row_on_two_hosts(slurm_cluster, one_process, tmp_path):
    file = tmp_path / "losses.json"
    options = ("-N2", "-n4")
    finished = slurm_cluster.srun(*options, PYTHON, EXAMPLE, *SHORT, "--losses", file, timeout=LIMIT)
    assert finished.returncode == 0
    assert "'model_parallel' would fit on one host, but its ranks [2, 3] are on several" in finished.stderr
    assert json.loads(file.read_text()) == pytest.approx(one_process.losses, rel=1e-6, abs=0)
