import json

import pytest

from distman import NonFiniteLossError
from distman.handler import Profiler
from distman.handler._profiling import merged
from distman.testing import ranks

from .problems import make_handler


@ranks(2)
def test_all_ranks_are_in_one_trace(rank, tmp_path):
    handler = make_handler(8)  # five steps
    handler.add_callback(Profiler(tmp_path / "folder" / "profile", wait=1, active=2))
    handler.train(1)
    if rank == 0:
        trace = json.loads((tmp_path / "folder" / "profile" / "trace.json").read_text())
        events = trace["traceEvents"]
        steps = {
            (event["pid"] // 1000, event["name"]) for event in events if event["name"].startswith("Optimizer.step")
        }
        assert steps == {(0, "Optimizer.step#Adam.step"), (1, "Optimizer.step#Adam.step")}
        for index in range(2):
            own = [event for event in events if event["pid"] // 1000 == index]
            assert sum(event["name"] == "Optimizer.step#Adam.step" for event in own) == 2
            assert any(event.get("args", {}).get("name", "").startswith(f"rank {index}: ") for event in own)


def test_a_short_training_is_profiled_to_its_end_and_an_error_drops_the_profile(tmp_path):
    handler = make_handler(65)
    handler.add_callback(Profiler(tmp_path, wait=0, active=100))
    handler.train(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "trace.json"]
    handler = make_handler(65, lr=1e200)
    handler.add_callback(Profiler(tmp_path / "none", wait=0, active=100))
    with pytest.raises(NonFiniteLossError):
        handler.train(9)
    assert not (tmp_path / "none").exists()


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    handler = make_handler(65)
    handler.add_callback(Profiler(tmp_path / "file", wait=0, active=1))
    assert len(handler.train(2)) == 2
    assert sum("the profile could not be written" in message for message in caplog.messages) == 2


def test_merged_traces_have_one_axis_of_time_and_rows_of_their_own():
    event = {"name": "op", "ph": "X", "pid": 7, "tid": 1, "ts": 2.5, "dur": 1}
    arrow = {"name": "arrow", "ph": "s", "pid": "GPU", "tid": 1, "ts": 3.0, "id": 1}
    traces = {rank: {"baseTimeNanoseconds": 4000 * rank, "traceEvents": [event, arrow]} for rank in (0, 1)}
    found = merged(traces)
    assert [(one["pid"], one["ts"]) for one in found["traceEvents"]] == [(0, 2.5), (1, 3.0), (1000, 6.5), (1001, 7.0)]
    assert [one["id"] for one in found["traceEvents"] if "id" in one] == ["0.1", "1.1"]


@pytest.mark.parametrize(("name", "value"), [("wait", -1), ("active", 0)])
def test_numbers_of_steps_are_checked(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        Profiler(tmp_path, **{name: value})
