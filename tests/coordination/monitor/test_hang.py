"""The report of a hang: what it says, and where it is."""

import logging
import os
import re
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager
from distman._coordination.monitor.hang import Answer, write_report
from distman.testing import ranks

NAMES = [f"rank {rank} (n{rank // 8}, pid {rank})" for rank in range(16)]
MAIN = 'thread MainThread\n  File "/train.py", line {line}, in main\n    step()\n\nthread other\n  File "x"'


def answers(elsewhere):
    waiting = Answer("in all_gather_v at /train.py:7 for 61 s", MAIN.format(line=7), "/train.py:7 in main")
    computing = Answer("after all_gather_v at /train.py:7", MAIN.format(line=99), "/train.py:99 in load")
    return {rank: computing if rank in elsewhere else waiting for rank in range(16) if rank != 5}


def test_ranks_with_equal_stacks_are_shown_together(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        write_report("rank 0 waits", 0, answers({3}), NAMES, tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert text.startswith("rank 0 waits\n\nrank 5 (n0, pid 5) does not answer")
    assert text.count("thread MainThread") == 2
    assert text.index("rank 3 (n0, pid 3)\nat /train.py:99 in load") < text.index("and 13 more (1, 2, 4, 6")
    (logged,) = (record.getMessage() for record in caplog.records)
    assert "rank 3 (n0, pid 3) at /train.py:99 in load, after all_gather_v at /train.py:7" in logged
    assert "rank 5 (n0, pid 5) without an answer" in logged
    assert str(path) in logged


def wait_for_work(_model):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()


def receive(_model):
    dist.send(torch.ones(1), 0) if dist.get_rank() else dist.recv(torch.ones(1), 1)


def reports(folder, name):
    """Return those of one wait: on a busy machine the way there may last long enough for another one."""
    texts = [path.read_text() for path in folder.glob("distman-hang-*.txt")]
    return [text for text in texts if f"waits in {name}" in text.partition("\n")[0]]


WAITS = {
    "torch's all_reduce": lambda _model: dist.all_reduce(torch.ones(1)),
    "torch's broadcast": lambda _model: dist.broadcast(torch.ones(1), 1),
    "torch's backward pass": lambda model: model(torch.ones(1)).backward(),
    "wait() of a collective of torch's": wait_for_work,
    "torch's message from rank 1 to rank 0": receive,
}


@pytest.mark.parametrize("name", WAITS)
@ranks(2, manager=False)
def test_a_wait_in_torch_that_lasts_is_reported_once(monkeypatch, tmp_path, rank, name):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    monkeypatch.setenv("DISTMAN_HANG_TIMEOUT", "2")
    monkeypatch.chdir(tmp_path)
    DistributedManager.initialize(timeout=60)
    model = torch.nn.Linear(1, 1)
    if name == "torch's backward pass":
        model = torch.nn.parallel.DistributedDataParallel(model)
    until = time.monotonic() + 60
    while rank == 1 and not reports(tmp_path, name) and time.monotonic() < until:
        time.sleep(0.05)
    WAITS[name](model)
    if rank == 0:
        (text,) = reports(tmp_path, name)
        call = r"(, call \d+ in group \S+ of \(0, 1\))?,?"
        where = rf"{re.escape(name)}{call} at \S*test_hang.py:\d+( in \S+)?(, in \w+\(\))? for [23] s"
        assert re.match(rf"rank 0 .* waits in {where}", text)
        assert re.search(rf"^in {where}$", text, re.MULTILINE)
        if name in ("torch's all_reduce", "wait() of a collective of torch's"):
            assert re.search(r"in group \S+ have begun: rank 1 \(.*\) \d+, rank 0 \(.*\) \d+\n", text)


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        write_report("rank 0 waits", 0, {0: answers(())[0]}, NAMES[:1], tmp_path / "missing")
    logged = caplog.records[0].getMessage()
    path = Path(logged.rpartition(" in ")[2])
    assert path.parent == tmp_path / f"distman-{os.getuid()}"
    assert path.exists()
    assert "; all do." in logged


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        (Answer("in barrier at a.py:1 for 3 s", "", "/train.py:3 in main"), "in barrier at a.py:1 for 3 s"),
        (Answer("", "", "/train.py:3 in main"), "at /train.py:3 in main"),
        (Answer("after barrier at a.py:1", "", ""), "after barrier at a.py:1"),
        (Answer("", "", "/a/\x1b[2J\n.py:3 in main"), r"at /a/\x1b[2J\n.py:3 in main"),
    ],
)
def test_the_place_of_a_rank(answer, place):
    assert answer.place == place


def test_a_collective_of_torch_is_found_in_the_users_program():
    found, functions = [], {}
    file = f"{torch.__path__[0]}/distributed/distributed_c10d.py"
    exec(compile("def all_reduce(thread): thread.start(); thread.join()", file, "exec"), functions)  # noqa: S102
    functions["all_reduce"](threading.Thread(target=lambda: found.append(Answer.here())))
    (answer,) = found
    line = rf"at {__file__}:\d+ in test_a_collective_of_torch_\w+, in \w+\(\)"
    assert re.fullmatch(rf"{line}(, after .+)?", answer.place)  # a test before this one may have waited
    assert file in answer.stacks
