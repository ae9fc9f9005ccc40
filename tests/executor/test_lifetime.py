"""Nothing is left behind: processes, threads, files and shared memory, however the program ends."""

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from ..launch.preloaded import PYTHON, server_variables
from ..launch.processes import private_shared_memory
from ..workers.preloaded import FORK_SERVERS

BUSY = """
import os, subprocess, sys, time
from pathlib import Path
from distman import ParallelExecutor, WorkerError

def work(device, folder):
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        Path(folder, "nested").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        inner = ParallelExecutor(devices=["cpu"])
        inner.run(lambda device: None)
    Path(folder, f"busy-{os.getpid()}").touch()
    time.sleep(300)

print(os.getpid(), flush=True)
with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
    executor.run(lambda device: None)
    for folder in sys.argv[1:]:
        try:
            executor.run(work, folder)
        except WorkerError as error:
            assert "was killed with its server" in str(error)
"""
LEAKS = """
import gc, os, signal, sys, threading
from pathlib import Path
import torch, multiprocessing
from distman import ParallelExecutor, WorkerError
from distman._workers import server_process

def state():
    gc.collect()
    files = sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{name}"))
    maps = sum("memfd" in line for line in open("/proc/self/maps"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return {"files": files, "maps": maps, "children": children, "handlers": handlers, "environ": dict(os.environ),
            "shm": sorted(os.listdir("/dev/shm")), "threads": [thread.name for thread in threading.enumerate()],
            "method": multiprocessing.get_start_method(allow_none=True), "path": list(sys.path),
            "seed": torch.initial_seed(), "rng": torch.get_rng_state().tolist(), "cwd": os.getcwd(),
            "torch_threads": torch.get_num_threads()}

def use(**options):
    with ParallelExecutor(devices=["cpu", "cpu"], timeout=1, **options) as executor:
        for n in range(5):
            results = executor.run(lambda device, given: given.repeat(3), torch.ones(100_000))
        list(executor.map(lambda device, n: torch.ones(n), range(0, 300_000, 50_000)))
        for fault in (lambda device: os.kill(os.getpid(), 9), lambda device: threading.Event().wait(),
                      lambda device: 1 / 0, lambda device: sys.exit(3), lambda device: threading.Lock()):
            try:
                executor.run(fault)
            except (WorkerError, ZeroDivisionError):
                pass
        pending = [executor.submit(lambda device: 1) for _ in range(9)]
    assert all(future.result() == 1 for future in pending)
    assert results[1].sum() == 300_000

own = server_process.sys, server_process._PROGRAM
{FORK_SERVERS}
before = state()
dropped = ParallelExecutor(devices=["cpu"])
dropped.run(lambda device: None)
del dropped
assert state() == before, (before, state())

dropped = ParallelExecutor(devices=["cpu"])
kept = [dropped.submit(lambda device: 5) for _ in range(3)] + list(dropped.map(lambda device, n: n, range(3)))
del dropped
assert [future.result() for future in kept[:3]] == [5] * 3
for thread in threading.enumerate():
    if thread.name.startswith("ParallelExecutor"):
        thread.join(20)
assert state() == before, (before, state())

shut = ParallelExecutor(devices=["cpu"])
future = shut.submit(lambda device: 5)
shut.shutdown(wait=False)
assert future.result() == 5
threading.Event().wait(1)
assert state() == before, (before, state())
for call in (shut.run, shut.submit):
    try:
        call(print)
    except RuntimeError as error:
        assert "must be open" in str(error)
shut.shutdown()

torch.set_num_threads(2)
torch.ones(10**7).sum()
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
before = state()
use()
assert state() == before, (before, state())
stop.set()

server_process.sys, server_process._PROGRAM = own
kept = ParallelExecutor(devices=["cpu"])
kept.run(lambda device: None)
print("done")
""".replace("{FORK_SERVERS}", FORK_SERVERS)
LATE = f"""{FORK_SERVERS}
import sys, time
from distman import ParallelExecutor

with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
    executor.run(lambda device: None)
    work = lambda device: time.sleep(300)
    print("busy", flush=True)
    if sys.argv[1] == "run":
        executor.run(work)
    elif sys.argv[1] == "future":
        executor.submit(work).result()
    else:
        executor.submit(work)
"""
SUBMITTED = f"""{FORK_SERVERS}
import time
from concurrent.futures import wait
from distman import ParallelExecutor

executor = ParallelExecutor(devices=["cpu"])
executor.run(lambda device: None)
futures = [executor.submit(lambda device: time.sleep(300)) for _ in range(3)]
print("busy", flush=True)
wait(futures)
"""
INTERACTIVE = f"""{FORK_SERVERS}
import sys, time
from distman import ParallelExecutor

sys.ps1, sys.last_value = ">>> ", KeyboardInterrupt()  # as after a Ctrl-C in a session that goes on
executor = ParallelExecutor(devices=["cpu"])
futures = [executor.submit(lambda device, n: n, n) for n in range(3)]
for future in futures:
    future.add_done_callback(lambda one: print("cancelled" if one.cancelled() else one.result(), flush=True))
"""
FORKED = f"""{FORK_SERVERS}
import os
from distman import ParallelExecutor

executor = ParallelExecutor(devices=["cpu"])
(worker,) = executor.run(lambda device: os.getpid())
pid = os.fork()
if pid == 0:
    (own,) = executor.run(lambda device: os.getpid())
    assert own != worker
    executor.shutdown()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert executor.run(lambda device: os.getpid()) == [worker]
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


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main_thread_runs(pid):
    """Return whether the main thread of a process does anything but wait."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


def wait_until(is_true, seconds):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.05)


@pytest.fixture
def mark():
    return f"mark-{uuid.uuid4()}"


@pytest.fixture
def start(mark):
    """Return a function that starts a program with arguments, marked in its environment."""
    started = []

    def start(program, *arguments):
        command = [*private_shared_memory(), PYTHON, "-c", program, *arguments]
        environ = {**os.environ, **server_variables(), "TEST_DISTMAN_MARK": mark}
        started.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def start_busy(start, tmp_path):
    """Return a function that starts a program whose workers are busy, once or several times, and have children."""

    def start_busy(num_times=1):
        folders = [tmp_path / str(number) for number in range(num_times)]
        for folder in folders:
            folder.mkdir()
        program = start(BUSY, *map(str, folders))
        return program, int(program.stdout.readline()), folders

    return start_busy


@pytest.fixture
def wait_until_busy(mark):
    """Return a function that waits for the workers' children and returns the two processes above the workers."""

    def wait_until_busy(pid, folder):
        wait_until(lambda: len(list(folder.glob("busy-*"))) == 2, 60)
        assert sum("sleep 300" in command for command in living(mark)) == 4
        (supervisor,) = children(pid)
        (server,) = children(supervisor)
        return {"supervisor": supervisor, "server": server}

    return wait_until_busy


@pytest.mark.parametrize("other", ["supervisor", "server"])
def test_nothing_outlives_a_program_that_is_killed_with_another(start_busy, wait_until_busy, mark, other):
    program, pid, (folder,) = start_busy()
    pids = wait_until_busy(pid, folder)
    os.kill(pid, signal.SIGKILL)
    os.kill(pids[other], signal.SIGKILL)
    wait_until(lambda: not living(mark), 5)
    assert program.communicate()[1] == ""


def test_what_workers_started_outlives_neither_server_nor_supervisor_nor_program(start_busy, wait_until_busy, mark):
    program, pid, (*folders, last) = start_busy(3)
    for victim, folder in zip(("supervisor", "server"), folders, strict=True):
        pids = wait_until_busy(pid, folder)
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda pids=pids: children(pid) not in ([], [pids["supervisor"]]), 5)
    wait_until_busy(pid, last)  # and nothing of those before is there
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not living(mark), 5)
    assert program.communicate()[1] == ""


@pytest.mark.parametrize("place", ["run", "future", "shutdown"])
def test_ctrl_c_ends_at_once(start, mark, place):
    program = start(LATE, place)
    assert program.stdout.readline() == "busy\n"
    time.sleep(0.3)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert program.returncode == -signal.SIGINT
    wait_until(lambda: not living(mark), 5)


def test_ctrl_c_ends_what_was_submitted_outside_with(start, mark):
    program = start(SUBMITTED)
    assert program.stdout.readline() == "busy\n"
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    wait_until(lambda: not living(mark), 5)


def test_ctrl_c_ends_what_was_submitted_when_the_program_has_come_to_its_end(start, mark):
    program = start("import os; print(os.getpid(), flush=True)" + SUBMITTED.replace("wait(futures)", ""))
    pid = int(program.stdout.readline())
    assert program.stdout.readline() == "busy\n"
    wait_until(lambda: not main_thread_runs(pid), 20)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    wait_until(lambda: not living(mark), 5)


def test_an_earlier_ctrl_c_in_a_session_does_not_end_what_was_submitted(start):
    output, errors = start(INTERACTIVE).communicate(timeout=20)
    assert (output.split(), errors) == (["0", "1", "2"], "")


def test_nothing_is_left_or_changed_after_shutdown(start, mark):
    output, errors = start(LEAKS).communicate(timeout=100)
    assert (output, errors) == ("done\n", "")
    wait_until(lambda: not living(mark), 5)


def test_a_copy_of_the_program_has_workers_of_its_own(run_program):
    run_program(FORKED)
