"""What becomes of an exception that nothing caught: the others are told first, whatever state the streams are in."""

import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import distman
from distman._base import timing
from distman._coordination import timeouts
from distman._coordination.failure import hook
from distman._coordination.failure.delivery import Delivery
from distman._coordination.failure.short_traceback import short_traceback
from distman.errors import BarrierTimeoutError, JobFailed

from ..ranks import failure_on


class Stream(io.StringIO):
    """Notes when it is written to."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def write(self, text):
        self.seen.append("printed")
        return super().write(text)


class BrokenStream:
    def __getattr__(self, name):
        raise LookupError(name)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.fixture
def seen():
    """What happens, in its order; the hook is in place, with a reporter that is part of it."""
    happened = []

    def report(error):
        happened.append(f"told {error}")
        return lambda: happened.append("finished")

    hook.install(report)
    yield happened
    hook.uninstall()


def fail(error=None):
    sys.excepthook(ValueError, error or ValueError("boom"), None)


def test_the_others_are_told_before_anything_is_printed(seen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Stream(seen))
    fail()
    assert (seen[0], seen[1], seen[-1]) == ("told boom", "printed", "finished")
    assert hook.has_failed()


@pytest.mark.parametrize("stream", [None, closed(), BrokenStream()], ids=["None", "closed", "broken"])
def test_streams_that_cannot_be_written_to_hide_nothing_from_the_others(seen, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    fail()
    hook.write("a word")
    assert seen == ["told boom", "finished"]


def test_a_pipe_that_nobody_reads_delays_nothing(seen, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as stream, monkeypatch.context() as patched:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        patched.setattr(sys, "stderr", stream)
        patched.setattr(timing, "PRINT", 0.01)
        patched.setattr(timing, "WRITE", 0.01)
        ended_with = []
        patched.setattr(hook.os, "_exit", ended_with.append)
        fail()
        assert seen == ["told boom", "finished"]
        hook._hook.at_exit()
        assert ended_with == [1]
        os.read(reading, 1 << 20)  # lets the thread that prints go on
    os.close(reading)


def test_an_error_in_the_reporter_hides_nothing(monkeypatch):
    def report(_):
        raise MemoryError

    hook.install(report)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(MemoryError):
        fail()
    assert "ValueError: boom" in stream.getvalue()
    hook.uninstall()


def test_a_process_is_ended_while_torch_prints_but_not_while_it_tells(monkeypatch):
    ended_with, is_waiting, has_ended = [], [], threading.Event()
    monkeypatch.setattr(timing, "PRINT", 0.01)
    timeouts._end_threads()
    earlier = threading.enumerate()  # of other tests, some with nothing else to do

    def end(code):
        if threading.current_thread() not in earlier:
            ended_with.append(code)
            has_ended.set()

    monkeypatch.setattr(hook, "exit_now", end)

    def wait(seconds):
        is_waiting.append(not has_ended.wait(seconds))

    hook.install(lambda _: wait(10 * timing.PRINT))
    variables = {"__name__": "torch.distributed.c10d_logger"}
    exec("def _excepthook(fail, write): fail(); write()", variables)  # noqa: S102 - of a module with that name
    variables["_excepthook"](fail, lambda: wait(60))
    assert is_waiting == [True, False]
    assert ended_with == [1]
    hook.uninstall()


def run(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_thread_is_told_where_the_program_wants_it(seen, capsys):
    run(lambda: [][0])
    assert "IndexError ended a thread of this rank. The other ranks are not told" in capsys.readouterr().err
    hook.set_thread_reporter(lambda error: seen.append(repr(error)))
    run(lambda: [][0])
    run(sys.exit)
    assert seen == ["IndexError('list index out of range')"]
    assert capsys.readouterr().err == ""


def test_a_failure_that_was_swallowed_is_told_at_the_end(seen):
    hook.require_end(Delivery(failure_on(1)))
    hook.report_at_end()
    assert seen[-1] == "finished"
    assert hook._hook.exit_code == JobFailed.EXIT_CODE


def test_one_that_was_shown_by_a_test_or_acknowledged_is_not(seen):
    for number, one in ((1, Delivery(failure_on(1))), (2, Delivery(failure_on(2)))):
        hook.require_end(one)
        with pytest.raises(JobFailed) as caught:
            raise one.next_error(sys._getframe() if number == 1 else None)
        if number == 2:
            caught.value.acknowledge()
        del caught
    hook.report_at_end()
    assert seen == []
    assert not hook.has_failed()


def swallow():
    hook.install(lambda _: None)
    hook.require_end(Delivery(failure_on(1)))


def test_a_process_of_multiprocessing_ends_with_an_error_too():
    process = multiprocessing.get_context("fork").Process(target=swallow)
    process.start()
    process.join(60)
    assert process.exitcode == JobFailed.EXIT_CODE


def test_a_failure_that_nobody_watches_for_is_shown_once(seen, capsys):
    errors = [failure_on(1).to_failure() for _ in range(2)]
    for error in errors:
        hook.required_end_by(error)
    assert capsys.readouterr().err.count("JobFailed: rank 1 (n1, pid 101) raised ValueError: boom") == 1
    assert seen == []
    assert len(hook._hook.deliveries) == 1


def test_a_traceback_leaves_out_what_is_not_the_users(monkeypatch):
    delivery = Delivery(failure_on(1))
    try:
        try:
            hook.run_with_timeout(lambda: [][0], 60.0)  # through a file of the package
        except IndexError as error:
            raise delivery.next_error(None) from error
    except JobFailed as error:
        shown = short_traceback(error)
        monkeypatch.setenv("DISTMAN_DEBUG", "1")
        in_full = short_traceback(error)
    assert in_full == ""
    assert "timeouts.py" not in shown
    assert shown.count("test_hook.py") == 3
    assert "JobFailed: rank 1" in shown


class OfDistmanError(BarrierTimeoutError):
    pass


@pytest.mark.parametrize(("kind", "of_package"), [(ValueError, ["internal_b.py"]), (OfDistmanError, [])])
@pytest.mark.parametrize("is_started_by_us", [False, True])
def test_of_an_error_that_came_through_this_package_the_users_lines_are_shown(
    monkeypatch, kind, of_package, is_started_by_us
):
    """Also where the process runs a program of the package's own, whose frame is not the first one here."""
    if is_started_by_us:
        monkeypatch.setattr(sys.modules["__main__"], "distman_search_path", [], raising=False)

    def user():
        package_a(lambda: package_b(kind))

    package_a = in_package("internal_a.py", "def f(work): work()")
    package_b = in_package("internal_b.py", "def f(kind): raise kind('no')")
    with pytest.raises(kind) as caught:
        user()
    shown = short_traceback(caught.value)
    assert re.findall(r"(internal_\w\.py|test_hook\.py)", shown) == ["test_hook.py"] * 3 + of_package
    assert shown.endswith(": no\n")
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    assert short_traceback(caught.value) == ""


@pytest.mark.parametrize(
    ("line", "beside"),
    [("raise ValueError('boom')", []), ("distman.environments.detect({'RANK': '0'})", ["lines of torch and distman"])],
    ids=["of the program", "of the package"],
)
def test_a_process_without_other_ranks_shows_its_own_lines_too(line, beside, tmp_path):
    tmp_path.joinpath("script.py").write_text(f"import distman\n{line}\n")
    command = [sys.executable, "-m", "script"]  # the interpreter shows lines of its own then
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    files = re.findall(r'File "(?:.*/)?(.+?)"|(lines of torch and distman)', finished.stderr)
    starter = "<frozen runpy>"
    assert [*map("".join, files)] == (beside or [starter] * 2) + ["script.py"]
    assert finished.returncode == 1


def in_package(name, source):
    """Return a function that seems to be in a file of the package."""
    scope = {}
    exec(compile(source, str(Path(distman.__file__).with_name(name)), "exec"), scope)  # noqa: S102 - a constant
    return scope["f"]


def test_an_error_of_the_program_alone_is_left_to_the_interpreter():
    with pytest.raises(ZeroDivisionError) as caught:
        raise ZeroDivisionError
    assert short_traceback(caught.value) == ""
