"""The example of a neural operator on a flow: on any mesh of ranks, the flow and the loss curve of one process."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch

from .preloaded import PYTHON
from .processes import launch

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "afno.py"
LIMIT = 120
SMALL = ("--trajectories", "4", "--snapshots", "2", "--steps", "8")


@dataclass(frozen=True)
class Training:
    mesh: str  # data parallel x spatial parallel x model parallel
    losses: list[float]
    flow: torch.Tensor  # trajectory, snapshot, field, row, column
    error: float
    persistence: float


def files(folder):
    return "--losses", folder / "losses.json", "--flow", folder / "flow.pt"


def read(finished, folder):
    assert finished.returncode == 0
    assert finished.stderr == ""
    losses = json.loads((folder / "losses.json").read_text())
    printed = re.fullmatch(
        r"(\d x \d x \d) ranks: .*\n"
        r"budgets close to (\S+) \(energy\) and (\S+) \(enstrophy\)\n"
        rf"step 8/8  mean loss {fmean(losses):.12f}\n"
        r"error on flows not seen (\S+), of the forecast of no change (\S+)\n",
        finished.stdout,
    )
    assert printed, "rank 0 prints mesh, budgets, losses and errors, and no other rank prints"
    mesh, energy, enstrophy, error, persistence = printed.groups()
    assert 0 < float(energy) < 1e-7
    assert 0 < float(enstrophy) < 1e-6
    return Training(mesh, losses, torch.load(folder / "flow.pt"), float(error), float(persistence))


def assert_same(training, reference, *, mesh):
    assert training.mesh == mesh
    assert len(training.losses) == 8
    assert training.losses == pytest.approx(reference.losses, rel=1e-9, abs=0)
    assert training.error == pytest.approx(reference.error, abs=1e-4)
    after_50_steps, expected = training.flow[:, 1], reference.flow[:, 1]
    assert (after_50_steps - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_process")
    return read(launch([PYTHON, EXAMPLE, *SMALL, *files(folder)], timeout=LIMIT), folder)


def test_one_process_learns_and_draws(tmp_path):
    picture = tmp_path / "afno.png"
    options = ("--trajectories", "8", "--snapshots", "6", "--steps", "100", "--plot", picture)
    finished = launch([PYTHON, EXAMPLE, *options, *files(tmp_path)], timeout=LIMIT)
    assert finished.returncode == 0  # matplotlib may say that it looks for fonts
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    error, persistence = map(float, re.search(r"not seen (\S+), .* change (\S+)\n", finished.stdout).groups())
    assert error < 0.9 * persistence
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_torchrun(preloaded_torchrun, one_process, tmp_path):
    options = ("--channel", "1", "--spatial", "2")
    finished = preloaded_torchrun.run(EXAMPLE, *SMALL, *options, *files(tmp_path), ranks=2, timeout=LIMIT)
    assert_same(read(finished, tmp_path), one_process, mesh="1 x 2 x 1")


def test_srun(slurm_cluster, one_process, tmp_path):
    options = ("-N2", "-n4", "--ntasks-per-node=2")  # both ranks that share the channels on one host
    finished = slurm_cluster.srun(*options, PYTHON, EXAMPLE, *SMALL, *files(tmp_path), timeout=LIMIT)
    assert_same(read(finished, tmp_path), one_process, mesh="2 x 1 x 2")
