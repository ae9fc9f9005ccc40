# ruff: noqa: ARG001, ARG005 - a function that is called on a device need not look at it
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, CancelledError
from pathlib import Path

import pytest
import torch

from distman import ParallelExecutor, WorkerDiedError, WorkerError
from distman._base.text import printable_lines

from ..workers.preloaded import FORK_SERVERS


class TwoArgumentsError(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class UnpicklableError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class LoadsNowhereError(Exception):
    def __reduce__(self):
        return eval, ("1/0",)


class SaysNothingError(Exception):
    def __str__(self):
        raise ValueError("no text")


def fail_with(error):
    raise error


def wait_until_gone(pid):
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_oneself(device, number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


FAULTS = {
    "SIGKILL": (
        kill_oneself,
        -9,
        r"died of SIGKILL. Look whether memory ran out",
    ),
    "SIGTERM": (lambda device: kill_oneself(device, signal.SIGTERM), -15, "died of SIGTERM. The next call"),
    "abort": (
        lambda device: os.abort(),
        -6,
        "died of SIGABRT.*\n\nIts traceback:\n  Fatal Python error: Aborted",
    ),
    "sys.exit(3)": (lambda device: sys.exit(3), 3, r"died with exit code 3: it called sys.exit: SystemExit: 3\n\nIts"),
    "sys.exit(text)": (lambda device: sys.exit("enough"), 1, "died with exit code 1: .* enough"),
    "sys.exit()": (lambda device: sys.exit(), 0, "died with exit code 0"),
    "os._exit(4)": (lambda device: os._exit(4), 4, "died with exit code 4"),
    "hangs up": (
        lambda device: (os.closerange(3, 200), time.sleep(60)),
        -9,
        "closed its connection and was killed. The next",
    ),
    "interrupted": (lambda device: fail_with(KeyboardInterrupt()), None, "raised KeyboardInterrupt"),
    "two arguments": (lambda device: fail_with(TwoArgumentsError(3, "no")), None, "raised .*TwoArgumentsError: 3: no"),
    "unpicklable": (lambda device: fail_with(UnpicklableError("bad")), None, "raised .*UnpicklableError: bad"),
    "does not load": (lambda device: fail_with(LoadsNowhereError("bad")), None, "raised .*LoadsNowhereError: bad"),
    "result": (lambda device: threading.Lock(), None, "returned a value that cannot be pickled: TypeError: cannot"),
    "result does not load": (
        lambda device: LoadsNowhereError("bad"),
        None,
        "returned a value that cannot be loaded here: ZeroDivisionError: division by zero",
    ),
}
WITHOUT_TRACEBACK = {"SIGKILL", "SIGTERM", "os._exit(4)", "hangs up", "result does not load"}
WITH_CAUSE = {"interrupted": KeyboardInterrupt, "sys.exit(3)": SystemExit, "result": TypeError}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_an_error_that_says_where_and_how(pair, fault):
    function, exit_code, message = FAULTS[fault]
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"(?s)^worker [01] \(cpu, pid \d+\) {message}") as caught:
        pair.run(lambda device: function(device))
    assert time.monotonic() - start < 20
    error = caught.value
    assert (error.device, error.exit_code) == ("cpu", exit_code)
    assert str(error.pid) in str(error)
    assert isinstance(error, WorkerDiedError) == isinstance(error, BrokenExecutor) == (exit_code is not None)
    assert error.index in (0, 1)
    assert bool(error.traceback_text) == (fault not in WITHOUT_TRACEBACK)
    assert printable_lines(error.traceback_text) in str(error)
    if fault in WITH_CAUSE:
        assert isinstance(error.__cause__, WITH_CAUSE[fault])
    assert pair.run(lambda device, x: x, 1) == [1, 1]


class WithStateError(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.more = [code]


ERRORS = [
    *(
        ValueError("deep"),
        KeyError("missing"),
        StopIteration(3),
        OSError(2, "none", "file"),
        TimeoutError(),
        CancelledError(),
    ),
    *(
        WithStateError(4),
        WorkerError("of an inner one"),
        RecursionError(),
    ),
]


@pytest.mark.parametrize("raised", ERRORS, ids=lambda error: type(error).__name__)
def test_what_the_function_raises_is_raised_here_and_says_where_it_was(pair, raised):
    future = pair.submit(fail_with_after, "device", raised)
    for wait in (future.result, lambda: pair.run(lambda device: fail_with(raised))):
        with pytest.raises(type(raised)) as caught:
            wait()
        error, cause = caught.value, caught.value.__cause__
        assert type(error) is type(raised)
        assert (error.args, str(error)) == (raised.args, str(raised))
        assert {**vars(error), "__notes__": []} == {**vars(raised), "__notes__": []}
        assert type(cause) is WorkerError
        assert (cause.device, cause.exit_code, cause.error_type) == ("cpu", None, type(raised).__name__)
        assert "in fail_with\n    raise error\n" in cause.traceback_text
        assert "distman" not in cause.traceback_text.replace(__file__, "").replace("distman.errors.WorkerError", "")
        assert f"It was raised on worker {cause.index} (cpu, pid {cause.pid})." in error.__notes__


def test_an_error_without_text_is_raised_as_it_is(pair):
    with pytest.raises(SaysNothingError) as caught:
        pair.submit(lambda device: fail_with(SaysNothingError())).result(20)
    assert "SaysNothingError" in str(caught.value.__cause__)


def fail_with_after(device, name, error):
    assert (device.type, name) == ("cpu", "device")
    fail_with(error)


def test_errors_that_a_program_defines_itself_can_be_caught(run_program):
    run_program(OWN_ERROR)


OWN_ERROR = f"""{FORK_SERVERS}
from distman import ParallelExecutor

class OwnError(Exception):
    pass

def fail(device, error):
    raise error or OwnError(3)

with ParallelExecutor(devices=["cpu"]) as executor:
    for error in (OwnError(3), None):
        try:
            executor.run(fail, error)
        except OwnError as caught:
            assert caught.args == (3,)
        assert type(executor.submit(fail, error).exception()) is OwnError
"""


def test_a_failure_of_one_ends_what_the_others_do(pair):
    first, second = pair.run(lambda device: os.getpid())

    def wait_for_the_first(device, first):
        if os.getpid() == first:
            raise ValueError("first")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^first") as caught:
        pair.run(wait_for_the_first, first)
    assert caught.value.__notes__[1:] == ["worker 1 was still busy and is ended"]
    assert time.monotonic() - start < 20
    later = pair.run(lambda device: os.getpid())
    assert later[0] == first
    assert later[1] != second


def test_workers_stay_after_an_ordinary_exception(pair):
    before = pair.run(lambda device: (os.getpid(), fail_with)[0])  # both have now imported this file
    with pytest.raises(ValueError, match="no") as caught:
        pair.run(lambda device: fail_with(ValueError("no")))
    assert all(str(index) in "".join(caught.value.__notes__) for index in (0, 1))
    assert pair.run(lambda device: os.getpid()) == before


def test_a_worker_that_died_at_rest_is_replaced_without_a_word(pair):
    before = pair.run(lambda device: os.getpid())
    os.kill(before[0], signal.SIGKILL)
    wait_until_gone(before[0])
    after = pair.run(lambda device: os.getpid())
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_futures_carry_the_errors(pair):
    futures = [pair.submit(function) for function in (kill_oneself, lambda device: 1 / 0, lambda device: 5)]
    with pytest.raises(WorkerError, match="SIGKILL"):
        futures[0].result(20)
    with pytest.raises(ZeroDivisionError):
        futures[1].result(20)
    assert futures[2].result(20) == 5


def test_what_cannot_be_pickled_on_the_way_there_is_a_type_error(pair):
    with pytest.raises(TypeError, match=r"func and its arguments must be picklable, got TypeError: cannot pickle"):
        pair.run(lambda device, lock: None, threading.Lock())
    with pytest.raises(TypeError, match=r"func and its arguments must be picklable"):
        pair.submit(lambda device, lock: None, threading.Lock()).result(20)
    with pytest.raises(WorkerError, match="could not load its task: ZeroDivisionError"):
        pair.run(lambda device, error: None, LoadsNowhereError("bad"))


def test_the_time_limit():
    # Both travel by value: the import of this file would take a good part of the time.
    def hang(device):
        threading.Event().wait()

    def stop_in_one(device, first):
        if os.getpid() == first:
            os.kill(os.getpid(), signal.SIGSTOP)

    with ParallelExecutor(devices=["cpu", "cpu"], timeout=1) as executor:
        assert executor.run(lambda device: 1) == [1, 1]  # the start does not count
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"did not answer within 1 s and was ended") as caught:
            executor.run(hang)
        assert time.monotonic() - start < 20
        assert "in hang" in caught.value.traceback_text
        assert caught.value.exit_code < 0
        with pytest.raises(WorkerError, match=r"did not answer within 1 s"):
            executor.submit(hang).result(20)
        first, second = executor.run(lambda device: os.getpid())
        with pytest.raises(WorkerError, match=r"worker 0 .* did not answer within 1 s") as caught:
            executor.run(stop_in_one, first)
        assert caught.value.exit_code == -signal.SIGKILL
        assert executor.run(lambda device: os.getpid())[1] == second


@pytest.mark.usefixtures("fresh_servers")
def test_the_start_of_a_worker_does_not_count(tmp_path, monkeypatch):
    # In each new interpreter:
    is_read = tmp_path / "is read"
    code = f"import pathlib, threading; threading.Event().wait(1.5); pathlib.Path({str(is_read)!r}).touch()"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with ParallelExecutor(devices=["cpu"], timeout=1, pass_device=False) as executor:
        assert executor.run(abs, -5) == [5]
        assert is_read.exists()


def test_descendants_of_a_dead_worker_neither_stay_nor_keep_the_caller():
    def leave_children(device):
        forked = os.fork()
        if forked == 0:
            os.setsid()
            time.sleep(300)
        started = subprocess.Popen(["sleep", "300"])
        escaped = subprocess.Popen(["sleep", "300"], start_new_session=True)
        return forked, started.pid, escaped.pid

    def die(device):
        os.kill(os.getpid(), signal.SIGKILL)

    with ParallelExecutor(devices=["cpu"]) as executor:
        (pids,) = executor.run(leave_children)
        with pytest.raises(WorkerError, match="SIGKILL"):
            executor.run(die)
        wait_until_gone(pids[1])
        assert executor.run(lambda device: 2) == [2]
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("error", [None, ValueError("in the copy"), SystemExit(3)])
def test_a_copy_that_the_function_forks_does_not_answer(pair, error):
    def fork_and_return(device, error):
        pid = os.fork()
        if pid == 0 and error is not None:
            raise error
        return "copy" if pid == 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    expected = 3 if isinstance(error, SystemExit) else int(error is not None)
    assert pair.run(fork_and_return, error) == [expected, expected]
    assert pair.run(lambda device: "next") == ["next", "next"]


def test_out_of_memory(pair):
    def limit_to(more_bytes):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def eat(device):
        limit_to(1024**3)
        return torch.ones(1024**3)

    def leave_no_room_for_a_copy(device):
        result = torch.ones(64 * 1024**2)
        limit_to(32 * 1024**2)
        return result

    def unlimit(device):
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with pytest.raises(RuntimeError, match=r"(?i)memory"):
        pair.run(eat)
    pair.run(unlimit)
    with pytest.raises(WorkerError, match=r"could not send its result: .*(?i:memory)"):
        pair.run(leave_no_room_for_a_copy)
    pair.run(unlimit)


def test_errors_can_be_pickled():
    error = WorkerError("text", device="cpu", index=1, pid=2, exit_code=-9, error_type="E", traceback_text="t")
    loaded = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert str(loaded) == "text"
    assert vars(loaded) == vars(error)
