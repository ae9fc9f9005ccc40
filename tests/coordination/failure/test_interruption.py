"""A failure that ends what the main thread does, whatever that is."""

import contextlib
import functools
import gzip
import os
import re
import signal
import subprocess
import threading
import weakref
import zipfile
from pathlib import Path

import h5py
import pytest

from distman._coordination.failure.delivery import Stage
from distman._coordination.failure.interruption import Interruption, Patience
from distman.errors import JobFailed

from ...launch import preloaded
from ..ranks import failure_on
from . import programs

PATIENCE = Patience(to_come=60.0, between_looks=0.01)


def make(is_over=None, tell=lambda _: None):
    return Interruption(lambda _: None, tell, is_over or threading.Event(), PATIENCE)


@contextlib.contextmanager
def delivering(record, is_over=None):
    """Let another thread deliver a record, as the watcher does, and wait until it is done."""
    is_over = is_over or threading.Event()
    interruption = make(is_over)
    thread = threading.Thread(target=interruption.deliver, args=[record])
    try:
        yield interruption, thread
        thread.join(60)
        assert not thread.is_alive()
    finally:
        is_over.set()
        interruption.restore()


def wait_for_it(thread):
    """Wait to be interrupted, which may happen before the thread is known to have started."""
    if thread.ident is None:
        thread.start()
    threading.Event().wait(60)


def test_a_test_that_fails_by_it_fails_no_other_test():
    with delivering(failure_on(1)) as (interruption, thread):
        with pytest.raises(JobFailed, match=r"rank 1 .* raised ValueError: boom"):
            wait_for_it(thread)
        thread.join(60)
        assert interruption._delivery.stage is Stage.SURVIVED


def test_a_job_that_was_left_in_another_thread_leaves_nothing_but_the_first_handler():
    before = signal.getsignal(signal.SIGURG)
    jobs = []
    for _ in range(3):
        abort_job = functools.partial(id)  # an object that can be missed
        jobs.append(weakref.ref(abort_job))
        interruption = make(tell=abort_job)
        del abort_job
        thread = threading.Thread(target=interruption.restore)
        thread.start()
        thread.join()
    assert [job() for job in jobs] == [None] * 3
    make().restore()
    assert signal.getsignal(signal.SIGURG) == before


def test_an_error_that_the_main_thread_raises_itself_is_not_raised_again():
    def wait(interruption):
        error = failure_on(1).to_failure()
        try:
            interruption.note(error)
            raise error
        finally:
            del error

    with delivering(failure_on(1)) as (interruption, thread):
        with pytest.raises(JobFailed):
            wait(interruption)
        thread.start()


def test_a_main_thread_that_awaits_it_is_left_alone():
    with delivering(failure_on(1)) as (interruption, thread):
        with interruption.awaited():
            thread.start()
            thread.join(10 * PATIENCE.between_looks)
        with pytest.raises(JobFailed):
            wait_for_it(thread)


def test_a_rank_that_has_left_the_job_is_left_alone():
    is_over = threading.Event()
    is_over.set()
    with delivering(failure_on(1), is_over) as (_, thread):
        thread.start()


def test_a_signal_that_is_not_ours_goes_to_the_handler_before():
    received = []
    before = signal.signal(signal.SIGURG, lambda number, _: received.append(number))
    try:
        interruption = make()
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG]
        interruption.restore()
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG] * 2
    finally:
        signal.signal(signal.SIGURG, before)


def named(*prefixes):
    """The programs whose names begin so."""
    return [name for name in vars(programs) if name.startswith(prefixes)]


HANDED_ON = named("plain", "through_", "while_", "holding_")
SWALLOWED = named("swallowed_")
FOR_EVER = named("for_ever_")
SURVIVED = named("survived")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What a program said, and its exit code, for each way of its to deal with the failure; all of them run at once."""
    folder = tmp_path_factory.mktemp("programs")
    names = (*HANDED_ON, *SWALLOWED, *FOR_EVER, *SURVIVED, *named("fails_", "ends_", "stuck_"))
    environ = os.environ | preloaded.server_variables()
    subprocess.run([preloaded.PYTHON, "-m", programs.__name__, folder, *names], check=True, timeout=120, env=environ)

    def read(name):
        stdout, stderr, code = (Path(folder, f"{name}.{what}").read_text() for what in ("stdout", "stderr", "code"))
        return stdout, stderr, int(code)

    return {name: read(name) for name in names} | {"folder": folder}


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_program_that_lets_it_go_on_ends_by_it(ended, name):
    stdout, stderr, code = ended[name]
    assert code == JobFailed.EXIT_CODE, stderr
    assert stdout.endswith("swallowed 0 times\n")
    assert stderr.count("JobFailed: rank 1 (n1, pid 101) raised ValueError: boom") == 1
    said = stdout.removesuffix("swallowed 0 times\n")
    said_in_handlers = {"through_finally": "cleaned up\n", "while_it_is_stored": "saved\n"}
    handlers = named("through_a_handler_", "through_a_slow_")
    expected = "the lock is free\n" if "holding" in name else "saved\n" if name in handlers else ""
    assert said == said_in_handlers.get(name, expected)


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_program_that_swallows_it_ends_by_it_all_the_same(ended, name):
    _, stderr, code = ended[name]
    assert code == JobFailed.EXIT_CODE, stderr
    assert stderr.count("JobFailed: rank 1 (n1, pid 101) raised ValueError: boom") == 1
    assert "thread MainThread" not in stderr


@pytest.mark.parametrize("name", FOR_EVER)
def test_a_program_that_does_not_end_by_it_is_ended(ended, name):
    stdout, stderr, code = ended[name]
    assert code == JobFailed.EXIT_CODE, stderr
    assert "told the launcher of ValueError" in stdout
    assert "the end" not in stdout
    assert "distman: rank 1 (n1, pid 101) raised ValueError: boom" in stderr
    assert ":\nthread MainThread" in stderr


def test_a_loop_of_waits_that_raise_it_is_ended_as_soon_as_any_other(ended):
    _, stderr, _ = ended["for_ever_by_a_loop_of_waits_that_raise_it"]
    assert "This process swallowed it" in stderr


@pytest.mark.parametrize("name", SURVIVED)
def test_a_program_that_says_so_survives_it(ended, name):
    stdout, stderr, code = ended[name]
    assert code == 0, stderr
    assert stdout == "the end\nswallowed 0 times\n"


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("fails_with_open_files", 1, "told KeyError: 7\n"),
        ("fails_by_exit_3", 3, "told exited: ended with exit code 3, by sys.exit() or SystemExit.\n"),
        ("fails_by_exit_1_in_a_handler", 1, "told KeyError: 'why'\n"),
        ("fails_with_a_child", 1, "told KeyError: 'why'\n"),
        ("ends_by_exit_0", 0, ""),
        ("ends_by_an_exit_code_that_is_expected", 75, ""),
        ("ends_though_an_exit_was_caught", 0, "the end\n"),
    ],
)
def test_an_error_or_an_exit_code_of_its_own_is_told(ended, name, code, told):
    stdout, stderr, found = ended[name]
    assert found == code, stderr
    assert re.sub(r"child \d+\n", "", stdout) == f"{told}swallowed 0 times\n"


@pytest.mark.parametrize("name", named("stuck_"))
def test_what_holds_the_end_up_is_cut_off(ended, name):
    _, stderr, code = ended[name]
    assert code == (JobFailed.EXIT_CODE if name == "stuck_as_a_survivor" else 1)
    assert "this process is cut off: 1 s after its program it still runs\nthread " in stderr


def test_processes_of_multiprocessing_end_with_a_failed_program(ended):
    (child,) = re.findall(r"child (\d+)", ended["fails_with_a_child"][0])
    assert not Path("/proc", child).exists()


@pytest.mark.parametrize("name", ["plain_with_open_files", "fails_with_open_files"])
def test_files_are_whole_at_the_end(ended, name):
    folder = ended["folder"] / name
    assert sorted(path.name for path in folder.iterdir()) == [
        "files.zip",
        "numbers.h5",
        "rows.csv",
        "text.gz",
        "text.txt",
    ]
    assert (folder / "text.txt").read_text() == "a line\n"
    assert gzip.decompress((folder / "text.gz").read_bytes()) == b"a line\n"
    assert (folder / "rows.csv").read_bytes() == b"1,2\r\n"
    assert zipfile.ZipFile(folder / "files.zip").read("a") == b"b"
    with h5py.File(folder / "numbers.h5") as file:
        assert file["x"][()] == 1
