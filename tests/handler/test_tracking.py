import json
import os
import re
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import distman
from distman import DistributedManager
from distman.handler import Callback, JsonLinesTracker, Preempted, TensorBoardTracker, Tracker
from distman.testing import ranks

from .problems import make_handler, regression


class Memory(Tracker):
    """Keeps what it is told to write."""

    def __init__(self, run=None):
        super().__init__(run)
        self.calls = []

    def open(self, run, step):
        self.calls.append(("open", run, step))

    def write(self, kind, records):
        self.calls += [(kind, record["step"]) for record in records]

    def close(self, status):
        self.calls.append(status)


class CutOffError(Exception):
    pass


class CutsOff(Callback):
    """Ends the training after a step, as a kill would."""

    def __init__(self, step, error=CutOffError):
        self.step, self.error = step, error

    def on_step_end(self, handler, step):
        if step == self.step:
            raise self.error


class Adds(Callback):
    def on_epoch_end(self, handler, record):
        record["added"] = 1.0


@ranks(2)
def test_rank_zero_writes_all_numbers_in_order(rank):
    handler = make_handler(24)
    handler.set_val_loader(regression(), batch_size=24)
    tracker = Memory("mine")
    handler.add_callback(tracker)
    handler.train(2)
    handler.train(3, validate_every_steps=2)
    first = [("step", 1), ("step", 2), ("epoch", 2), ("step", 3), ("step", 4), ("epoch", 4), "finished"]
    second = [("validation", 4), ("step", 5), ("step", 6), ("validation", 6), ("epoch", 6), "finished"]
    expected = [("open", "mine", 0), *first, ("open", "mine", 4), *second]
    assert tracker.calls == (expected if rank == 0 else [])


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@ranks(2)
def test_a_resumed_training_goes_on_with_its_run(rank, tmp_path, monkeypatch):
    monkeypatch.setattr("distman.handler._accumulators._MOST_UNREAD", 1)  # so that a step after the checkpoint is told
    path = tmp_path / "logs" / "numbers.jsonl"
    for step in (4, None):
        handler = make_handler(8)  # five steps in an epoch
        handler.auto_save(tmp_path / "run", every_steps=3)
        handler.add_callback(tracker := JsonLinesTracker(path))
        handler.add_callback(TensorBoardTracker(tmp_path))
        handler.add_callback(Adds())
        handler.add_callback(CutsOff(step))
        with pytest.raises(CutOffError) if step else nullcontext():
            handler.train(2)
        if step and rank == 0:
            assert lines_of(path)[-1]["step"] == 4
            with path.open("a") as file:
                file.write('{"run": ')  # as a kill may leave it
        DistributedManager().barrier()
    if rank == 0:
        lines = lines_of(path)
        assert {line["run"] for line in lines} == {tracker.run}
        assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 11))
        assert [(line["step"], line["added"]) for line in lines if line["kind"] == "epoch"] == [(5, 1.0), (10, 1.0)]
        (events,) = (one for one in tmp_path.iterdir() if one.is_dir() and one.name not in ("run", "logs"))
        curves = EventAccumulator(str(events)).Reload()
        losses = [line["loss"] for line in lines if line["kind"] == "step"]
        points = [(point.step, point.value) for point in curves.Scalars("step/loss")]
        assert points == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=1)]
        assert [point.step for point in curves.Scalars("epoch/added")] == [5, 10]


def test_a_name_stays_where_a_checkpoint_has_none(tmp_path):
    handler = make_handler(65)
    handler.add_callback(tracker := Memory("mine"))
    untrained = make_handler(65)
    untrained.add_callback(Memory())
    untrained.save(tmp_path / "saved.pt")
    handler.load(tmp_path / "saved.pt")
    assert tracker.run == "mine"


NAMES = st.text(
    st.one_of(
        st.sampled_from("/\\\\.'\"`\n\r\0\x1b\u202e\u2066\u2028\u200b ~%ab"),
        st.characters(),
    )
)


@given(name=st.one_of(NAMES, st.sampled_from(["/x", "..", ".", "", " ", "../x", "a/../../x", "x' AND '"])))
@settings(max_examples=1_000)
def test_the_name_of_a_run_is_one_folder_and_one_word(name):
    tracker = Memory("mine")
    try:
        Memory(name)
    except ValueError:
        tracker.load_state_dict({"run": name})
        assert tracker.run == "mine"
        return
    folder = Path("/runs").joinpath(name)
    assert folder.parent == Path("/runs")
    assert os.path.normpath(folder) == f"/runs/{name}"
    assert name.isprintable()
    assert not {*"'\"`\\"} & {*name}
    tracker.load_state_dict({"run": name})
    assert tracker.run == name


@pytest.mark.parametrize("name", ["absolute", "../outside", "inside/../../outside", "..", 7, ["x"], torch.ones(1)])
def test_a_checkpoint_does_not_say_where_a_tracker_writes(name, tmp_path, caplog):
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    handler = make_handler(65)
    handler.add_callback(TensorBoardTracker(runs))
    handler.save(tmp_path / "saved.pt")
    state = distman.checkpoint.load(tmp_path / "saved.pt")
    (saved,) = (one for _, one in state["callbacks"] if "run" in one)
    saved["run"] = str(outside) if name == "absolute" else name
    distman.checkpoint.save(state, tmp_path / "saved.pt")
    handler = make_handler(65)
    handler.add_callback(tracker := TensorBoardTracker(runs))
    handler.load(tmp_path / "saved.pt")
    handler.train(1)
    assert "does not go on with the run of the checkpoint" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "saved.pt"}
    assert [path.name for path in runs.iterdir()] == [tracker.run]


def test_another_run_leaves_the_lines_of_others(tmp_path):
    path = tmp_path / "numbers.jsonl"
    path.write_text("not JSON\n[1]\n")
    for run in ("first", "second", "second"):  # the latter begins anew
        handler = make_handler(65)
        handler.add_callback(JsonLinesTracker(path, run))
        handler.train(1)
    assert path.read_text().startswith("not JSON\n[1]\n")
    kept = [json.loads(line) for line in path.read_text().splitlines()[2:]]
    expected = [(run, kind) for run in ("first", "second") for kind in ("step", "epoch")]
    assert [(line["run"], line["kind"]) for line in kept] == expected


class Fails(Memory):
    def __init__(self, method):
        super().__init__()
        setattr(self, method, self.fail)

    def fail(self, *_):
        raise OSError("no such\nserver")


def full_disk(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    return JsonLinesTracker(tmp_path / "full")


def no_folder(tmp_path):
    (tmp_path / "file").touch()
    return TensorBoardTracker(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: Fails("open"), r"Fails failed: OSError: no such\\nserver"),
        (lambda _: Fails("write"), "Fails failed: OSError"),
        (lambda _: Fails("close"), "Fails failed: OSError"),
        (full_disk, "JsonLinesTracker failed: OSError: .*No space left on device"),
        (no_folder, "TensorBoardTracker failed: NotADirectoryError"),
    ],
    ids=["open", "write", "close", "full disk", "no folder"],
)
def test_a_tracker_that_fails_is_switched_off_with_one_warning(make, reason, tmp_path, caplog):
    handler = make_handler(8)
    handler.add_callback(make(tmp_path))
    handler.train(2)
    assert len(handler.train(3)) == 3
    (told,) = [message for message in caplog.messages if "switched off" in message]
    assert re.search(reason, told)


class Blocks(Memory):
    def __init__(self):
        super().__init__()
        self.goes_on, self.is_called = threading.Event(), threading.Event()

    def write(self, kind, records):
        self.is_called.set()
        self.goes_on.wait()


@pytest.mark.parametrize(
    ("limit", "value"), [("_base.timing.TRACKER_REST", 0.01), ("handler._tracking._MOST_WAITING", 1)]
)
def test_a_tracker_that_is_slow_holds_nothing_up(limit, value, monkeypatch, caplog):
    monkeypatch.setattr(f"distman.{limit}", value)
    handler = make_handler(8)
    tracker = Blocks()
    handler.add_callback(tracker)
    handler.train(3)
    (told,) = [message for message in caplog.messages if "Blocks is too slow" in message]
    assert ("calls are waiting" in told) == limit.endswith("_MOST_WAITING")
    tracker.goes_on.set()


def test_a_run_that_was_interrupted_is_told_from_one_that_failed():
    ends = []
    for error in (Preempted(75), ValueError()):
        handler = make_handler(65)
        handler.add_callback(tracker := Memory())
        handler.add_callback(CutsOff(1, error))
        with pytest.raises(type(error)):
            handler.train(1)
        ends.append(tracker.calls[-2:])
    assert ends == [[("step", 1), "preempted"], [("step", 1), "failed"]]
