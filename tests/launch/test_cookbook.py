"""The scripts of the cookbook: each under a real launcher, and on several ranks what it is on one process.

`digits.py`, `model_parallel.py` and `afno.py` have files of their own.
"""

import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from distman import DistributedManager
from distman.handler import EarlyStopping, Preempted
from distman.testing import ranks

from ..test_docs import rows
from . import preloaded
from .preloaded import PYTHON
from .processes import launch, marked, start

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LIMIT = 120
EX_TEMPFAIL = 75
NUM_CLUSTERS = 12
KMEANS = ("kmeans.py", "--clusters", NUM_CLUSTERS)
OWN_LOOP = ("own_loop.py", "--epochs", 6)
CLASSIFIER = ("classifier.py", "--epochs", 6, "--images", 300, "--width", 2)
GAN = ("gan.py", "--epochs", 4)
HDF5 = ("hdf5_regression.py", "--epochs", 2)
UNET = ("unet.py", "--epochs", 2, "--width", 4, "--batch", 6)  # a rank of three often has two hidden maps
PROFILES = ("conditional_score.py", "--epochs", 40, "--profiles", 2400, "--width", 64, "--samples", 40)
PREEMPTION = ("preemption.py", "--save-every", 50)
WAVES = ("shallow_water.py", "--snapshots", 5, "--steps", 8, "--width", 4)
FABRIC = ("with_fabric.py", "--epochs", 3)


def words(script, *arguments):
    return [EXAMPLES / script, *map(str, arguments)]


def output_of(finished):
    """Return what rank 0 printed; the other ranks print nothing."""
    assert finished.returncode == 0
    return finished.stdout


def assert_same(found, expected, rank):
    """Compare what rank 0 printed, but for rounding."""
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-9) if rank == 0 else found == ""


def last_lines(text):
    return "".join(text.splitlines(keepends=True)[-2:])


def losses_of(text):
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith("loss"))


@cache
def alone(script, *arguments):
    """Return what a script prints on one process."""
    return output_of(launch([PYTHON, *words(script, *arguments)], timeout=LIMIT))


def run_here(script, *arguments):
    """Run a script in this rank, as an interpreter does; return what it prints."""
    with redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(map(str, words(script, *arguments))))
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        finally:
            DistributedManager.cleanup()  # as the end of an interpreter does
    return output.getvalue()


def numbers(text):
    return [float(number) for number in re.findall(r"(?<![\w.])-?\d+\.\d+(?:e[-+]\d+)?", text)]


@pytest.fixture(scope="module")
def clusters_alone():
    return alone(*KMEANS)


@pytest.fixture(scope="module")
def losses_alone():
    return alone(*OWN_LOOP)


@pytest.fixture(scope="module")
def gan_alone():
    return alone(*GAN)


@pytest.fixture(scope="module")
def bars(tmp_path_factory):
    return tmp_path_factory.mktemp("bars")


@pytest.fixture(scope="module")
def bars_alone(bars):
    return alone(*HDF5, "--folder", bars)


@pytest.fixture(scope="module")
def sea_alone(tmp_path_factory):
    return alone(*UNET, "--folder", tmp_path_factory.mktemp("sea"))


@pytest.fixture(scope="module")
def waves_alone():
    return alone(*WAVES)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    files = "--weights", folder / "weights.pt", "--predictions", folder / "alone.csv"
    assert "500 are right, on 1 ranks" in alone("evaluation.py", *files)
    return folder


def test_the_page_shows_every_script():
    shown = [re.match(r"\[(\w+\.py)\]", row[0]) for row in rows("docs/cookbook.md")]
    assert sorted(name[1] for name in shown) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_clusters_are_those_of_scikit_learn(clusters_alone):
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    points = load_digits().data / 16.0
    centers = points.mean(axis=0, keepdims=True)
    for _ in range(NUM_CLUSTERS):  # the point that is farthest from those before
        distances = ((points[:, None] - centers) ** 2).sum(axis=2).min(axis=1)
        centers = np.concatenate([centers, points[distances.argmax(), None]])
    reference = KMeans(NUM_CLUSTERS, init=centers[1:], n_init=1, tol=0).fit(points)
    assert numbers(clusters_alone)[-2] == pytest.approx(reference.inertia_ / len(points), rel=1e-9)


@ranks(3, manager=False)
def test_clusters(clusters_alone, rank):
    assert_same(run_here(*KMEANS), clusters_alone, rank)


@ranks(1, 3, manager=False)
def test_the_soliton_keeps_its_shape(rank):
    """The error is that of a method of fourth order."""
    coarse, fine = (run_here("schroedinger.py", "--rows=7", "--columns=256", f"--steps={n}") for n in (20, 40))
    if rank == 0:
        (error, mass), (smaller, _) = numbers(coarse), numbers(fine)
        assert error < 4e-6
        assert error / smaller == pytest.approx(16, rel=0.05)
        assert mass < 1e-11


@ranks(2, 3, 4, manager=False)
def test_waves_on_a_field_that_is_split(waves_alone, tmp_path, rank):
    """Two ranks split the rows, three the columns, and four both."""
    plot = tmp_path / f"{rank}.png"  # the folder is that of all ranks
    assert_same(run_here(*WAVES, "--plot", plot), waves_alone, rank)
    assert plot.exists() == (rank == 0)


@ranks(4, manager=False)
def test_waves_on_a_field_beside_data_parallelism(waves_alone, rank):
    assert_same(run_here(*WAVES, "--rows", 1, "--columns", 2), waves_alone, rank)


def test_waves_are_learnt():
    volume, later, first, last, error = numbers(alone("shallow_water.py", "--snapshots", 7, "--steps", 100))
    assert later == pytest.approx(volume, rel=1e-12)
    assert last < 0.1 * first
    assert error < 0.5


@ranks(3, manager=False)
def test_a_loop_of_ones_own(losses_alone, rank):
    assert_same(run_here(*OWN_LOOP), losses_alone, rank)


def test_a_loop_of_ones_own_learns(losses_alone):
    *losses, error = numbers(losses_alone)
    assert len(losses) == 6
    assert error < 0.65
    assert losses[-1] < 0.65 < losses[0]


@ranks(1, 3, manager=False)
def test_two_networks_of_which_each_has_an_optimizer(gan_alone, tmp_path, rank):
    """Started again they go on where they were, and end as one process that does not stop."""
    found = run_here("gan.py", "--epochs", 2, "--folder", tmp_path), run_here(*GAN, "--folder", tmp_path)
    assert_same(found[1], gan_alone, rank)


@pytest.fixture(scope="module")
def classifiers_alone(tmp_path_factory):
    """Return what one process prints with float64, and with bfloat16."""
    folder = tmp_path_factory.mktemp("classifiers")
    return [
        alone(*CLASSIFIER, "--folder", folder / "float64"),
        alone(*CLASSIFIER, "--amp", "bf16", "--folder", folder / "bf16"),
    ]


@ranks(3, manager=False)
def test_a_classifier_that_is_preempted(classifiers_alone, tmp_path, monkeypatch, rank, world_size):
    command = (*CLASSIFIER, "--folder", tmp_path)

    def ask(_callback, _handler, step):
        if step == 2 and rank == world_size - 1:
            DistributedManager().request_stop()

    with monkeypatch.context() as patch:
        patch.setattr(EarlyStopping, "on_step_end", ask)
        with pytest.raises(Preempted, match=str(EX_TEMPFAIL)):
            run_here(*command)
    assert_same(losses_of(run_here(*command)), losses_of(classifiers_alone[0]), rank)
    if rank == 0:
        assert len([*tmp_path.glob("best/checkpoint-*.pt")]) == 3
        assert len([*tmp_path.glob("curves/*")]) == 1  # the second start went on with the first one's


@ranks(3, manager=False)
def test_a_classifier_with_mixed_precision(classifiers_alone, tmp_path, rank):
    found = losses_of(run_here(*CLASSIFIER, "--amp", "bf16", "--folder", tmp_path))
    if rank == 0:
        assert numbers(found) == pytest.approx(numbers(losses_of(classifiers_alone[1])), rel=0.01)


def test_a_classifier_learns(classifiers_alone):
    for found in map(numbers, map(losses_of, classifiers_alone)):
        assert len(found) == 12
        assert found[-1] < found[1]


@ranks(2, manager=False)
def test_hdf5_files(bars, bars_alone, rank):
    assert "1281 samples; last loss" in bars_alone
    found = run_here(*HDF5, "--folder", bars)
    assert_same(last_lines(found), last_lines(bars_alone), rank)


@ranks(2, manager=False)
def test_hdf5_files_kept_in_memory(bars, bars_alone, rank):
    assert bars_alone  # the files are there
    found = run_here("hdf5_regression.py", "--epochs", 20, "--cached", "--folder", bars)
    if rank == 0:
        assert numbers(last_lines(found))[-1] < 1.35  # a guess is right to a factor of 1.65


@ranks(3, manager=False)
def test_a_loss_over_those_pixels_that_are_seen(sea_alone, tmp_path, rank):
    found = run_here(*UNET, "--folder", tmp_path)
    assert_same(losses_of(found), losses_of(sea_alone), rank)
    first, *_, last, _ = numbers(losses_of(sea_alone))
    assert last < 0.7 * first


@ranks(3, manager=False)
def test_each_sample_is_evaluated_once(evaluated, tmp_path, rank, world_size):
    table = tmp_path / "predictions.csv"
    found = run_here("evaluation.py", "--weights", evaluated / "weights.pt", "--predictions", table)
    if rank == 0:
        from sklearn.datasets import load_digits

        counted = re.match(rf"(\d+) of 500 are right, on {world_size} ranks", found)
        assert table.read_text() == (evaluated / "alone.csv").read_text()
        _, *lines = table.read_text().splitlines()
        samples, predicted, truth = zip(*(map(int, line.split(",")) for line in lines), strict=True)
        assert samples == tuple(range(500))
        assert truth == tuple(load_digits().target[-500:])
        assert sum(map(int.__eq__, predicted, truth)) == int(counted[1]) > 450


@ranks(1, 3, manager=False)
def test_a_point_of_a_study(tmp_path, rank):
    """What is left of the walkers is what the probabilities say; one who looks again finds it."""
    run_here("array_study.py", "--folder", tmp_path, "--task", 2)
    if rank == 0:
        file = tmp_path / "point-2.json"
        left = json.loads(file.read_text())["left"]
        assert left == pytest.approx(probability_to_be_left(distance=2, catches=0.3), abs=0.015)
        file.write_text(file.read_text().replace(str(left), "0.5"))
    run_here("array_study.py", "--folder", tmp_path, "--task", 2)
    if rank == 0:
        table = run_here("array_study.py", "--folder", tmp_path, "--table")
        assert table == "distance 2  caught with 0.3  left 0.5000\nmissing: 0,1,3,4,5,6,7\n"


def probability_to_be_left(distance, catches):
    density = np.zeros(200)
    density[100] = 1
    for _ in range(64):
        density = (np.roll(density, 1) + np.roll(density, -1)) / 2
        density[100 + distance] *= 1 - catches
    return density.sum()


def test_a_search(preloaded_torchrun):
    command = ("sweep.py", "--steps", 15)
    table = alone(*command, "--workers", 1)
    assert output_of(preloaded_torchrun.run(*words(*command), ranks=2, timeout=LIMIT)) == table
    assert table.count("ValueError: Invalid learning rate: -1.0") == 2
    best = re.search(r"best: rate (\S+), width 32, accuracy (\S+)\n", table)
    assert best[1] == "0.01"
    assert float(best[2]) > 0.7


def test_a_model_of_a_density(tmp_path):
    """Two ranks train it on the page about score-based models."""
    picture = tmp_path / "mixture.png"
    options = ("--steps", 300, "--points", 60, "--samples", 300, "--sampling-steps", 60, "--plot", picture)
    found = alone("mixture.py", *options)
    truth, of_model = map(float, re.search(r"mean log-density (\S+), of the model (\S+):", found).groups())
    assert -2.55 < of_model < truth  # the best that a single Gaussian comes to is -2.63
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Return the folder of a model that one process has trained, and what it has drawn."""
    folder = tmp_path_factory.mktemp("profiles")
    return folder, alone(*PROFILES, "--folder", folder)


@ranks(3, manager=False)
def test_a_trained_model_draws_the_same(profiles, tmp_path, rank):
    if rank == 0:
        shutil.copytree(profiles[0], tmp_path / "run", symlinks=True)
    found = run_here(*PROFILES, "--folder", tmp_path / "run")
    assert "epoch" not in found
    samples = "".join(profiles[1].splitlines(keepends=True)[-4:])
    assert_same(found, samples, rank)
    _, _, of_parts, *_ = numbers(samples)
    assert of_parts < 0.2  # where nothing is learned it is 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_a_training_that_is_interrupted_ends_as_one_that_is_not(number, tmp_path):
    left_alone = alone(*PREEMPTION, "--folder", tmp_path.parent / "left alone")
    command = [PYTHON, *words(*PREEMPTION, "--folder", tmp_path)]
    with start(command) as interrupted:
        interrupted.wait_for_output("epoch 4/", timeout=LIMIT)  # the save after step 150 has waited for those before
        os.kill(interrupted.pid, number)
        finished = interrupted.wait(timeout=LIMIT)
    asked = re.search(r"asked to stop; saved after step (\d+)\n", finished.stdout)
    assert finished.returncode == (-number if asked is None else EX_TEMPFAIL)
    assert (asked is None) == (number == signal.SIGKILL)
    assert "weights" not in finished.stdout
    resumed = output_of(launch(command, timeout=LIMIT))
    assert resumed.startswith(f"going on after step {asked[1] if asked else ''}")
    assert last_lines(resumed) == last_lines(left_alone)


def test_two_ranks_of_which_one_is_asked_to_stop(preloaded_torchrun, tmp_path):
    """The launcher that goes on with them is another one."""
    command = words(*PREEMPTION, "--epochs", 7, "--folder", tmp_path / "interrupted")
    with start(["distman", "run", "-n", "2", *command], env=preloaded.variables()) as interrupted:
        interrupted.wait_for_output("epoch 2/", timeout=LIMIT)
        ranks_of_it = [one for one in marked(interrupted.marker) if re.search(r"-u \S*preemption.py", one.command)]
        ranks_of_it[1].send(signal.SIGTERM)
        finished = interrupted.wait(timeout=LIMIT)
    assert finished.returncode == EX_TEMPFAIL
    (step,) = re.findall(r"asked to stop; saved after step (\d+)\n", finished.stdout)
    resumed = output_of(preloaded_torchrun.run(*command, ranks=2, timeout=LIMIT))
    assert resumed.startswith(f"going on after step {step}\n")
    left_alone = preloaded_torchrun.run(
        *words(*PREEMPTION, "--epochs", 7, "--folder", tmp_path), ranks=2, timeout=LIMIT
    )
    assert last_lines(resumed) == last_lines(output_of(left_alone))


def test_fabric_beside(preloaded_torchrun):
    for finished in (
        preloaded_torchrun.run(*words(*FABRIC), ranks=2, timeout=LIMIT),
        launch([PYTHON, *words(*FABRIC, "--devices", 2)], timeout=LIMIT),
    ):
        (accuracy,) = re.findall(r"500 predictions of 2 ranks, accuracy (\S+)", output_of(finished))
        assert float(accuracy) > 0.85


def test_fabric_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(SystemExit, match=r"^This example needs Lightning Fabric: pip install lightning-fabric$"):
        run_here("with_fabric.py")
