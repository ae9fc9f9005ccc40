"""Trackers of other projects, with what these read and write themselves."""

import random
import struct
import sys

import pytest
import wandb
from mlflow import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record

from distman.handler import MLflowTracker, WandbTracker

from .problems import make_handler
from .test_tracking import CutOffError, CutsOff

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow's tables


@pytest.fixture(autouse=True)
def _each_step_is_told_in_the_end(monkeypatch):
    """One comes after the checkpoint; and a busy machine takes long to import these packages."""
    monkeypatch.setattr("distman.handler._accumulators._MOST_UNREAD", 1)
    for name in ("TRACKER_REST", "TRACKER_AFTER_ERROR"):
        monkeypatch.setattr(f"distman._base.timing.{name}", 300)


def train_in_two_jobs(make_tracker, folder):
    """Train for ten steps, and end the first job after the fourth, with a checkpoint after the third."""
    for step in (4, None):
        handler = make_handler(13)
        handler.auto_save(folder / "checkpoints", every_steps=3)
        handler.add_callback(tracker := make_tracker())
        handler.add_callback(CutsOff(step))
        if step is None:
            return handler.train(2), tracker.run
        with pytest.raises(CutOffError):
            handler.train(2)
    raise AssertionError


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A database, which takes a second to make; a server takes longer to install than all other packages."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def test_mlflow_has_one_run_with_each_step_once(tmp_path, uri):
    history, name = train_in_two_jobs(lambda: MLflowTracker(uri, experiment="mine", params={"lr": 0.02}), tmp_path)
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == (name, "FINISHED", {"lr": "0.02"})
    steps = client.get_metric_history(run.info.run_id, "step/loss")
    assert sorted(point.step for point in steps) == list(range(1, 11))
    epochs = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "epoch/loss")}
    assert epochs == dict(zip([5, 10], history["loss"], strict=True))


def test_mlflow_takes_a_name_as_a_name(uri):
    """Each name finds its own run, and no other one, whatever the language of its questions makes of it."""
    generator = random.Random(5)  # noqa: S311 - no secret
    names = {"mine", *("".join(generator.choices("a%_;-=()[]{},.:#$&*? é", k=6)) for _ in range(8))}
    for step in (0, 1):
        for name in names:
            tracker = MLflowTracker(uri, run=name)
            tracker.open(name, step)
            tracker.close("finished")
    client = MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert sorted(run.data.tags["distman.run"] for run in found) == sorted(names)
    for name in ("mine' OR tags.a != 'b", "x' AND attributes.status = 'RUNNING", "it's", "\\", "`"):
        with pytest.raises(ValueError, match="run must be one name without slashes, quotes"):
            MLflowTracker(uri, run=name)


def records_of(path):
    """Yield what is in a file of W&B, a log in the format of LevelDB."""
    data = path.read_bytes()[7:]  # after the head
    while data:
        _, size, kind = struct.unpack("<IHB", data[:7])
        assert kind == 1  # whole, as long as the file is smaller than a block of 32 kB
        yield Record.FromString(data[7 : 7 + size])
        data = data[7 + size :]


def test_wandb_goes_on_with_a_run_and_leaves_our_hooks(tmp_path):
    hooks = sys.excepthook, sys.exit
    folders = [tmp_path / "1", tmp_path / "2"]  # W&B tells two jobs of one run by the second in which they start
    for folder in folders:
        folder.mkdir()
    rest = iter(folders)
    _, name = train_in_two_jobs(lambda: WandbTracker(project="mine", mode="offline", dir=next(rest)), tmp_path)
    assert (sys.excepthook, sys.exit) == hooks
    wandb.teardown()  # waits for the process that writes
    jobs = [list(records_of(path)) for folder in folders for path in folder.glob("wandb/offline-run-*/*.wandb")]
    assert [record.run.run_id for job in jobs for record in job if record.HasField("run")] == [name, name]
    assert [record.exit.exit_code for job in jobs for record in job if record.HasField("exit")] == [1, 0]
    steps = [
        int(item.value_json)
        for job in jobs
        for record in job
        if any(item.key == "step/loss" or item.nested_key == ["step/loss"] for item in record.history.item)
        for item in record.history.item
        if "step" in (item.key, *item.nested_key)
    ]
    assert steps == [1, 2, 3, 4, *range(4, 11)]  # W&B has both of a step that was done again
