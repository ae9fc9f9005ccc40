"""Threads that start or end the job at once: one does it, and the others wait for it."""

import contextlib
import os
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from distman import DistmanError, DistributedManager, NotInitializedError, RendezvousError
from distman._job.manager.state import OneAtATime
from distman.testing import ranks

NUM_THREADS = 6


def at_once(function, num_threads=NUM_THREADS):
    """Call a function in several threads at once, and return what each of them returned or raised."""
    together = threading.Barrier(num_threads)

    def call():
        together.wait()
        try:
            return function()
        except DistmanError as error:
            return error

    with ThreadPoolExecutor(num_threads) as pool:
        return [future.result() for future in [pool.submit(call) for _ in range(num_threads)]]


@pytest.mark.parametrize("num_threads", [2, 8])
@ranks(1, 3, manager=False)
def test_threads_that_initialize_at_once_share_the_answer(rank, world_size, num_threads):
    for _ in range(3):
        managers = at_once(DistributedManager.initialize, num_threads)
        assert [(manager.rank, manager.world_size) for manager in managers] == [(rank, world_size)] * num_threads
        DistributedManager().barrier()
        at_once(DistributedManager.cleanup, num_threads)
        assert not DistributedManager.is_initialized()


def test_threads_that_initialize_at_once_each_have_an_error_where_all_fail(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    errors = at_once(lambda: DistributedManager.initialize(rendezvous_timeout=0.5), 2)
    assert [type(error) for error in errors] == [RendezvousError] * 2
    assert DistributedManager.initialize(use_distributed=False).world_size == 1


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_start_and_end_at_random_disturb_nobody(seed):
    generators = iter([random.Random(f"{seed} {index}") for index in range(NUM_THREADS)])  # noqa: S311 - a test

    def work():
        generator = next(generators)
        for _ in range(50):
            generator.choice([lambda: DistributedManager.initialize(device="cpu"), DistributedManager.cleanup])()
            with contextlib.suppress(NotInitializedError):
                assert DistributedManager().rank == 0

    outcomes = at_once(work)
    assert all(outcome is None or isinstance(outcome, NotInitializedError) for outcome in outcomes)
    DistributedManager.cleanup()
    assert DistributedManager.initialize(device="cpu").world_size == 1


def test_a_start_within_a_start_of_the_same_thread_is_refused(monkeypatch):
    seen = []

    def start_again(*_):
        DistributedManager.cleanup()
        with pytest.raises(DistmanError, match="must not be called while this thread starts or ends the job") as error:
            DistributedManager.initialize()
        seen.append(error)

    monkeypatch.setattr("distman.manager.requested_device", start_again)
    DistributedManager.initialize()
    assert len(seen) == 1
    assert DistributedManager().world_size == 1


class WithSignal:
    """A lock with which a signal comes at once, when it is acquired for the first time."""

    def __init__(self, lock):
        self.lock = lock
        self.is_first = True

    def __enter__(self):
        self.lock.acquire()
        if self.is_first:
            self.is_first = False
            signal.raise_signal(signal.SIGUSR2)

    def __exit__(self, *_):
        self.lock.release()


def test_a_handler_of_a_signal_may_end_the_job_whenever_it_comes():
    turns, ended = OneAtATime(), []
    turns._lock = WithSignal(turns._lock)

    def end(*_):
        with turns.alone():
            ended.append(True)

    before = {
        number: signal.signal(number, handler)
        for number, handler in {signal.SIGUSR2: end, signal.SIGALRM: interrupt}.items()
    }
    try:
        signal.setitimer(signal.ITIMER_REAL, 10.0)  # seconds; else it would wait for itself for ever
        with turns.alone():
            assert ended == [True]
            assert turns.is_here
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not turns.is_here


class InterruptedByOtherError(Exception):
    """What a signal handler raises, as the failure of another rank does."""


def interrupt(*_):
    raise InterruptedByOtherError


def test_who_waits_for_another_thread_can_be_interrupted():
    turns, is_held, goes_on = OneAtATime(), threading.Event(), threading.Event()

    def hold():
        with turns.alone():
            is_held.set()
            goes_on.wait()

    def wait_for_holder():
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # seconds; without it the wait would not end
        with turns.alone():
            pass

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(InterruptedByOtherError):
            wait_for_holder()
    finally:
        signal.signal(signal.SIGALRM, before)
        goes_on.set()
        holder.join()
    with turns.alone():
        assert turns.is_here


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent():
    is_held, goes_on = threading.Event(), threading.Event()

    def hold():
        from distman.manager import _lifecycle

        with _lifecycle.alone():
            is_held.set()
            goes_on.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(DistributedManager.initialize(use_distributed=False).rank)
    goes_on.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("seed", "error"), [("7", TypeError), (1.5, TypeError), (True, TypeError), (-1, ValueError)])
def test_a_wrong_seed_is_refused_before_there_is_a_job(seed, error):
    with pytest.raises(error, match="seed must be"):
        DistributedManager.initialize(seed=seed)
    assert not DistributedManager.is_initialized()
