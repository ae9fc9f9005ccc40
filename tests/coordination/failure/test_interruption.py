"""A failure that ends what the main thread does, whatever that is."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from distman._coordination.failure.interruption import EXIT_CODE, Interruption
from distman.errors import RankFailedError

from ..ranks import failure_on


@pytest.fixture
def interruption():
    made = Interruption(lambda _: None, threading.Event(), grace=60.0)
    yield made
    made.restore()


def deliver(interruption, record):
    """Deliver a record from another thread, as the watcher does, and wait for the signal to be handled here."""
    thread = threading.Thread(target=interruption.deliver, args=[record])
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_the_main_thread_raises_it(interruption):
    with pytest.raises(RankFailedError, match=r"rank 1 .* raised ValueError: boom"):
        deliver(interruption, failure_on(1))


def test_a_main_thread_that_awaits_it_is_left_alone(interruption):
    with interruption.awaited():
        deliver(interruption, failure_on(1))
    with pytest.raises(RankFailedError):
        deliver(interruption, failure_on(1))


def test_a_rank_that_has_left_the_job_is_left_alone():
    is_over = threading.Event()
    interruption = Interruption(lambda _: None, is_over, grace=60.0)
    is_over.set()
    deliver(interruption, failure_on(1))
    interruption.restore()


def test_a_signal_that_is_not_ours_goes_to_the_handler_before():
    received = []
    before = signal.signal(signal.SIGURG, lambda number, _: received.append(number))
    try:
        interruption = Interruption(lambda _: None, threading.Event(), grace=60.0)
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG]
        interruption.restore()
        os.kill(os.getpid(), signal.SIGURG)
        assert received == [signal.SIGURG] * 2
    finally:
        signal.signal(signal.SIGURG, before)


CANNOT_BE_INTERRUPTED = """
import threading
from distman._coordination.failure.interruption import Interruption
from distman._coordination.failure.record import FailureRecord

def interrupt():  # made in a thread, it has no handler of signals: nothing interrupts the main thread
    tell = lambda error: print(f"told the launcher of {error.error_type}")
    interruption = Interruption(tell, threading.Event(), grace=0)
    interruption.deliver(FailureRecord(1, "n1", 101, "ValueError", "boom"))

threading.Thread(target=interrupt).start()
threading.Event().wait(60)
"""


def test_a_process_that_cannot_be_interrupted_says_why_and_ends():
    ended = subprocess.run(
        [sys.executable, "-c", CANNOT_BE_INTERRUPTED], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == EXIT_CODE
    assert ended.stdout == "told the launcher of ValueError\n"
    assert "distman: rank 1 (n1, pid 101) boom" in ended.stderr
    assert "This process could not be interrupted:\nthread MainThread" in ended.stderr
