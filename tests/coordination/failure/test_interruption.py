"""A failure that ends what the main thread does, whatever that is."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from distman._coordination.failure import hook
from distman._coordination.failure.interruption import Interruption, Patience
from distman.errors import RankFailedError

from ..ranks import failure_on

PROGRAM = Path(__file__).parent / "swallowing.py"
PATIENCE = Patience(to_come=60.0, between_looks=0.01)


@contextlib.contextmanager
def delivering(record, is_over=None):
    """Let another thread deliver a record, as the watcher does, and wait until it is done."""
    is_over = is_over or threading.Event()
    interruption = Interruption(lambda _: None, is_over, patience=PATIENCE)
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


def test_the_main_thread_raises_it_until_it_is_handled_by_name():
    num_swallowed = 0
    with delivering(failure_on(1)) as (_, thread):
        while num_swallowed < 2:
            try:
                wait_for_it(thread)
            except Exception:  # noqa: BLE001 - what must not end it
                num_swallowed += 1
        with pytest.raises(
            RankFailedError, match=r"rank 1 .* raised ValueError: boom[^$]*caught 2 times .*in test_the"
        ):
            wait_for_it(thread)


def test_a_job_that_was_left_in_another_thread_leaves_nothing_but_the_first_handler():
    before = signal.getsignal(signal.SIGURG)
    jobs = []
    for _ in range(3):
        abort_job = functools.partial(id)  # an object that can be missed
        jobs.append(weakref.ref(abort_job))
        interruption = Interruption(abort_job, threading.Event())
        del abort_job
        thread = threading.Thread(target=interruption.restore)
        thread.start()
        thread.join()
    assert [job() for job in jobs] == [None] * 3
    interruption = Interruption(lambda _: None, threading.Event())
    interruption.restore()
    assert signal.getsignal(signal.SIGURG) == before


def test_an_error_that_the_main_thread_raises_itself_is_not_raised_again():
    with delivering(failure_on(1)) as (interruption, thread):
        with pytest.raises(RankFailedError):
            raise_and_note(interruption)
        thread.start()


def raise_and_note(interruption):
    try:
        raise failure_on(1).to_error()
    except RankFailedError as error:
        interruption.note(error)  # at its end, as a wait does
        raise


def test_one_that_was_handled_once_may_be_swallowed_when_a_later_wait_raises_it():
    interruption = Interruption(lambda _: None, threading.Event(), patience=PATIENCE)
    with pytest.raises(RankFailedError):
        raise_and_note(interruption)
    with contextlib.suppress(Exception):
        raise_and_note(interruption)
    interruption.restore()
    assert interruption._delivery.is_handled


def test_an_error_that_is_on_its_way_when_the_job_is_left_is_judged_where_it_is_caught():
    interruption = Interruption(lambda _: None, threading.Event(), patience=PATIENCE)

    def work():
        try:
            raise_and_note(interruption)
        finally:
            interruption.restore()

    with pytest.raises(RankFailedError):
        work()
    for thread in threading.enumerate():
        if thread.name == "distman-failure":
            thread.join(60)
    assert interruption._delivery.is_handled
    assert interruption._delivery.num_swallowed == 0
    assert interruption._delivery.error is None, "it would keep the variables of the frames that it came through"


def test_a_handler_that_names_it_is_left_alone():
    with delivering(failure_on(1)) as (_, thread):
        try:
            raise failure_on(1).to_error()
        except RankFailedError:
            thread.start()
            thread.join(10 * PATIENCE.between_looks)
            assert thread.is_alive()


def test_a_main_thread_that_awaits_it_is_left_alone():
    with delivering(failure_on(1)) as (interruption, thread):
        with interruption.awaited():
            thread.start()
            thread.join(10 * PATIENCE.between_looks)
        with pytest.raises(RankFailedError):
            wait_for_it(thread)


def test_a_main_thread_that_has_had_no_turn_is_not_taken_for_stuck():
    """The limit may pass while nobody runs: the whole process was suspended, say, or the host is busy."""

    class Suspended(threading.Event):
        num_waits = 0

        def wait(self, timeout=None):
            self.num_waits += 1
            return self.num_waits > 1 and super().wait(timeout)

    ended = []
    with delivering(failure_on(1)) as (interruption, thread):
        interruption._is_answered = Suspended()
        interruption._exit = lambda *_: ended.append("ended")
        with pytest.raises(RankFailedError):
            wait_for_it(thread)
    assert ended == []


def test_a_rank_that_has_left_the_job_is_left_alone():
    is_over = threading.Event()
    is_over.set()
    with delivering(failure_on(1), is_over) as (_, thread):
        thread.start()


def test_a_signal_that_is_not_ours_goes_to_the_handler_before():
    received = []
    before = signal.signal(signal.SIGURG, lambda number, _: received.append(number))
    try:
        interruption = Interruption(lambda _: None, threading.Event())
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG]
        interruption.restore()
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG] * 2
    finally:
        signal.signal(signal.SIGURG, before)


SWALLOWED_FOR_EVER = (
    "in_logging",
    "in_a_destructor",
    "in_a_callback_of_asyncio",
    "for_each_item",
    "by_a_bare_except",
    "by_finally_and_return",
    "in_a_callback_of_c",
    "in_a_weak_reference",
    "in_the_garbage_collector",
    "by_suppress",
    "for_too_long",
    "in_finally_for_too_long",
    "in_native_code",
)
SWALLOWED_AT_THE_END = (
    "and_saved_before_sys_exit_0",
    "once",
    "after_which_the_job_is_left",
    "in_a_function_that_leaves_the_job",
)
LEFT_THE_PROGRAM = ("by_tasks_of_asyncio", "and_raised_again")
HANDLED = (
    "named_and_slow",
    "named_by_its_base_class",
    "named_in_a_tuple",
    "named_and_left",
    "named_after_the_job_is_left",
    "named_around_what_is_swallowed_in_a_finally",
    "shown_by_a_console",
)
LEFT_THE_PROGRAM += ("in_a_group",)
HANDLED += ("out_of_a_group",)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What a program said, and its exit code, for each way of its to deal with the failure; all of them run at once."""
    folder = tmp_path_factory.mktemp("swallowing")
    names = (*SWALLOWED_FOR_EVER, *SWALLOWED_AT_THE_END, *LEFT_THE_PROGRAM, *HANDLED)
    subprocess.run([sys.executable, PROGRAM, folder, *names], check=True, timeout=120)

    def read(name):
        stdout, stderr, code = ((folder / f"{name}.{what}").read_text() for what in ("stdout", "stderr", "code"))
        return stdout, stderr, int(code)

    return {name: read(name) for name in names}


@pytest.mark.parametrize("name", SWALLOWED_FOR_EVER)
def test_a_program_that_does_not_end_by_it_is_ended(ended, name):
    stdout, stderr, code = ended[name]
    assert code == hook.EXIT_CODE, stderr
    assert "told the launcher of ValueError" in stdout
    assert "the end" not in stdout
    assert "distman: rank 1 (n1, pid 101) raised ValueError: boom" in stderr
    assert ":\nthread MainThread" in stderr


@pytest.mark.parametrize("name", SWALLOWED_AT_THE_END)
def test_a_program_that_swallowed_it_ends_with_an_error(ended, name):
    _, stderr, code = ended[name]
    assert code == hook.EXIT_CODE, stderr
    assert "distman: rank 1 (n1, pid 101) raised ValueError: boom" in stderr
    assert "catch RankFailedError by name" in stderr


@pytest.mark.parametrize("name", LEFT_THE_PROGRAM)
def test_a_program_that_lets_it_go_in_the_end_fails_by_it(ended, name):
    _, stderr, code = ended[name]
    assert code == 1, stderr
    assert "RankFailedError: rank 1 (n1, pid 101) raised ValueError: boom" in stderr
    assert "This error was caught" in stderr


@pytest.mark.parametrize("name", HANDLED)
def test_a_program_that_handles_it_goes_on(ended, name):
    stdout, stderr, code = ended[name]
    assert code == 0, stderr
    assert stdout.endswith("the end\n")
    assert "caught" not in stderr
