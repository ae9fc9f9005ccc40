"""A signal to all processes of a job leaves loaders their workers; other children, and the end, are as ever."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data._utils import signal_handling, worker

from distman import DistributedManager
from distman._process_state import reset


@pytest.fixture(autouse=True)
def _leave():
    yield
    reset()


PROGRAM = """
import os, signal, sys
from torch.utils.data import DataLoader
from distman import DistributedManager

class Pids:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return os.getpid()

def main():
    global iterator
    DistributedManager.initialize()
    iterator = iter(DataLoader(Pids(), num_workers=2, multiprocessing_context=sys.argv[1]))
    workers = {next(iterator).item() for _ in range(4)}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        for pid in workers:
            os.kill(pid, number)
    for _ in range(20):
        assert next(iterator).item() in workers
    if sys.argv[2] == "raises":
        raise ValueError("boom")
    if sys.argv[2] == "is killed":
        os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("context", "way", "code"),
    [
        ("fork", "returns", 0),
        ("fork", "raises", 1),
        ("fork", "is killed", -signal.SIGTERM),
        ("spawn", "returns", 0),
        ("forkserver", "is killed", -signal.SIGTERM),
    ],
)
def test_workers_read_on_after_a_stop_signal_and_end_with_their_parent(tmp_path, context, way, code):
    """Standard error is a pipe that the workers hold, too: it ends with the last of them."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, context, way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code
    assert "DataLoader worker" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_other_children_die_of_it(number):
    DistributedManager.initialize().should_stop()
    fork = multiprocessing.get_context("fork")
    is_up = fork.Event()
    child = fork.Process(target=lambda: (is_up.set(), signal.pause()))
    child.start()
    is_up.wait()  # a signal that comes during the fork is lost to any handler in Python
    os.kill(child.pid, number)
    child.join()
    assert child.exitcode == -number


def test_cleanup_gives_torch_its_workers_back():
    before = signal_handling._set_worker_signal_handlers, worker._worker_loop
    DistributedManager.initialize()
    assert before != (signal_handling._set_worker_signal_handlers, worker._worker_loop)
    DistributedManager.cleanup()
    assert before == (signal_handling._set_worker_signal_handlers, worker._worker_loop)
