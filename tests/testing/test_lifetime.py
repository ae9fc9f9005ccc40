import os
import resource
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from distman._base import timing
from distman._workers.server_process import ServerProcess, WorkerProcess
from distman.testing import _rank_pool
from distman.testing._rank_pool import RankProcess

BUSY = """
import subprocess, time
from pathlib import Path
from distman.testing import ranks

@ranks(2)
def test_busy(rank):
    subprocess.Popen(["sleep", "61"], start_new_session=rank == 1)
    Path(f"busy{rank}").touch()
    time.sleep(60)
"""
GOOD = """
import os, signal
from pathlib import Path
from distman.testing import ranks

@ranks(2)
def test_first(rank):
    Path(f"pid{rank}").write_text(str(os.getpid()))

@ranks(1)
def test_fewer(rank):
    assert Path(f"pid{rank}").read_text() == str(os.getpid())

@ranks(3)
def test_more(rank):
    assert rank == 2 or Path(f"pid{rank}").read_text() == str(os.getpid())

@ranks(2, dies=[0, 1])
def test_the_server_dies(rank):
    if rank == 0:
        Path(f"ppid").write_text(str(os.getppid()))
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()

@ranks(2)
def test_after_the_server(rank):
    assert Path("ppid").read_text() != str(os.getppid())
    assert not os.environ.get("RANK") is None
"""
BROKEN = """
from distman.testing import ranks

@ranks(2, 3)
def test_one():
    pass
"""
TORCHLESS = """
import subprocess, sys
from pathlib import Path
from distman.testing import ranks

def test_ordinary():
    assert "torch" not in sys.modules
    assert "numpy" not in sys.modules
    assert "cloudpickle" not in sys.modules
    assert not Path("/proc/self/task", str(__import__("os").getpid()), "children").read_text()
"""


def living(mark):
    """Return the command lines of all processes whose environment holds the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marked and command:
            found.append(command)
    return found


def wait_until(is_true, seconds):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def mark():
    return f"mark-{uuid.uuid4()}"


@pytest.fixture
def busy(project, mark, tmp_path):
    """Pytest in the middle of a test, as the leader of a process group."""
    for old in project.folder.glob("busy*"):
        old.unlink()
    project.write(BUSY)
    environ = project.environ(TEST_DISTMAN_MARK=mark, TMPDIR=str(tmp_path))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            project.command("-q", "-p", "no:hypothesispytest"),  # it takes a second to end
            cwd=project.folder,
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_until(lambda: all((project.folder / f"busy{rank}").exists() for rank in (0, 1)), 60)
    yield process
    if process.poll() is None:
        process.kill()
        process.wait()


def test_nothing_outlives_a_killed_pytest(busy, mark, tmp_path):
    assert sum("sleep 61" in command for command in living(mark)) == 2
    assert len(living(mark)) == 8  # pytest, supervisor, server, two workers, what those started, their store
    busy.kill()
    busy.wait()
    wait_until(lambda: not living(mark), 5)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_ctrl_c_ends_all_at_once(busy, mark, tmp_path):
    start = time.monotonic()
    os.killpg(busy.pid, signal.SIGINT)
    assert busy.wait(10) == pytest.ExitCode.INTERRUPTED
    assert time.monotonic() - start < 5
    assert not living(mark)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()


def test_workers_stay_are_more_when_needed_and_survive_their_server(project, mark, tmp_path):
    project.write(GOOD)
    run = project.run("-q", is_fresh=True, TEST_DISTMAN_MARK=mark, TMPDIR=str(tmp_path))
    assert run.counts() == {"passed": 5}, run.output
    assert not living(mark)
    assert not list(tmp_path.iterdir())


def test_workers_that_cannot_start_are_reported_once_per_test(project, tmp_path):
    project.write(BROKEN)
    (tmp_path / "torch.py").write_text("raise SystemError('this torch is broken')")
    run = project.run(
        "-q", is_fresh=True, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    assert run.counts() == {"failed": 2}, run.output
    assert run.output.count("this torch is broken") == 4


def test_ordinary_tests_load_and_start_nothing(project):
    project.write(TORCHLESS)
    run = project.run("-q", is_fresh=True)
    assert run.counts() == {"passed": 1}, run.output


@pytest.fixture
def server(tmp_path):
    server = ServerProcess("distman.testing._rank_loop:prepare", [str(tmp_path / "stores"), 0])
    yield server
    server.close()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_rank_that_its_server_does_not_end_is_killed(server, monkeypatch):
    monkeypatch.setattr(timing, "WORKER_END", 0.5)
    worker = RankProcess(server)
    (fork_server,) = children(server.supervisor.pid)
    os.kill(fork_server, signal.SIGSTOP)
    try:
        _rank_pool.TestRun([worker], 60, []).abandon()
        wait_until(lambda: not Path(f"/proc/{worker.pid}/cmdline").read_bytes(), 5)  # it has no memory any more
    finally:
        os.kill(fork_server, signal.SIGCONT)
        worker.close()


@pytest.mark.parametrize("num_free", [1, 2])
def test_a_worker_without_descriptors_leaves_none_open(num_free):
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are wanted
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + num_free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            WorkerProcess(None, {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
