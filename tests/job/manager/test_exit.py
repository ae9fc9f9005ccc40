"""What exit handlers are told that come after the rank has left its job, as those registered before initialize() do."""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
import threading

import pytest

from distman import DistmanError, DistributedManager, JobFailed, NotInitializedError
from distman._coordination import protocol
from distman.decorators import on_rank
from distman.testing import ranks

from .test_forks import CONCERNS_OTHERS, IS_KNOWN


def leave_at_exit():
    """Do what the exit handler of the package does."""
    DistributedManager._cleanup_at_exit(os.getpid())


@ranks(1, 2)
def test_an_exit_handler_that_comes_later_still_gets_answers():
    manager = DistributedManager()
    manager.create_process_subgroup("all", manager.world_size)
    known = {name: call(manager) for name, call in IS_KNOWN.items()}
    leave_at_exit()
    assert DistributedManager.is_initialized()
    assert {name: call(DistributedManager()) for name, call in IS_KNOWN.items()} == known
    ran = []
    on_rank(0)(lambda: ran.append(manager.rank))()
    assert ran == [0] * (manager.rank == 0)


@ranks(2)
def test_an_exit_handler_that_comes_later_is_refused_what_concerns_the_other_ranks():
    manager = DistributedManager()
    manager.create_process_subgroup("all", manager.world_size)
    leave_at_exit()
    for name, call in CONCERNS_OTHERS.items():
        with pytest.raises(DistmanError) as caught:
            call(manager)
        assert "must be made before the rank leaves its job at the end of the program" in str(caught.value), name


@ranks(1, 2)
def test_a_cleanup_in_an_exit_handler_that_comes_later_forgets():
    manager = DistributedManager()
    leave_at_exit()
    leave_at_exit()
    DistributedManager.cleanup()
    with pytest.raises(NotInitializedError):
        _ = manager.rank


FORK = multiprocessing.get_context("fork")


def become_rank(rank, port, work, other_has_ended):
    values = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in values.items()}
    manager = DistributedManager.initialize(device="cpu")
    manager.barrier()
    work(manager, other_has_ended)


def forked_ranks(work, first, collect=lambda: None):
    """Let two processes of multiprocessing be ranks; return their exit codes. The first one ends before the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    has_ended = FORK.Event()
    processes = [FORK.Process(target=become_rank, args=(rank, port, work, has_ended)) for rank in range(2)]
    for process in processes:
        process.start()
    collect()
    processes[first].join()
    has_ended.set()
    processes[1 - first].join()
    return [process.exitcode for process in processes]


def leave_one_after_the_other(manager, other_has_ended, *, end=lambda: sys.exit(3)):
    if manager.rank == 1:
        end()
        return
    assert other_has_ended.wait(60)
    assert manager._state.job.rendezvous.store.check([protocol.left(1)])


def test_a_process_of_multiprocessing_that_ends_has_left_the_job():
    assert forked_ranks(leave_one_after_the_other, first=1) == [0, 3]


def raise_error(_=None):
    raise ValueError("boom")


def raise_while_a_thread_waits_for_the_other(other_has_ended):
    threading.Thread(target=other_has_ended.wait, args=[60]).start()
    raise_error()


def exit_with_what_was_caught(_):
    try:
        raise_error()
    except ValueError:
        sys.exit(1)


def hear_of_it(manager, other_has_ended, *, how):
    if manager.rank == 0:
        how(other_has_ended)
    with pytest.raises(JobFailed, match=r"rank 0 .* raised ValueError: boom"):
        manager.barrier("never opens")


@pytest.mark.parametrize("how", [raise_error, raise_while_a_thread_waits_for_the_other, exit_with_what_was_caught])
def test_an_error_that_ends_a_process_of_multiprocessing_is_told(how):
    assert forked_ranks(functools.partial(hear_of_it, how=how), first=1) == [1, JobFailed.EXIT_CODE]


def raise_or_hear(manager, _):
    if manager.rank == 0:
        raise_error()
    manager.barrier("never opens")


def test_a_process_of_multiprocessing_that_ends_with_the_error_of_another_one_prints_it(capfd):
    assert forked_ranks(raise_or_hear, first=0) == [1, JobFailed.EXIT_CODE]
    assert "JobFailed: rank 0 " in capfd.readouterr().err


def test_an_error_that_the_program_handles_does_not_end_a_process_of_multiprocessing_that_it_starts():
    try:
        raise_error()
    except ValueError:
        assert forked_ranks(functools.partial(leave_one_after_the_other, end=bool), first=1) == [0, 0]


class Answer:
    def __reduce__(self):
        threading.Event().wait(0.5)  # seconds; in the thread that sends what is in the queue
        return Answer, ()


def answer_and_fail(manager, _, *, answers):
    if manager.rank == 0:
        answers.put(Answer())
        raise_error()
    with contextlib.suppress(JobFailed):
        manager.barrier("never opens")
    answers.put(Answer())


def test_what_a_process_of_multiprocessing_has_put_into_a_queue_arrives_though_it_fails():
    answers = FORK.Queue()
    work = functools.partial(answer_and_fail, answers=answers)
    assert forked_ranks(work, 0, lambda: [answers.get(timeout=60) for _ in range(2)]) == [1, JobFailed.EXIT_CODE]


def ask_the_store_that_is_left(manager, other_has_ended):
    if manager.rank == 0:
        sys.exit(3)
    assert other_has_ended.wait(60)
    assert manager._state.job.rendezvous.store.get(protocol.LEFT) == b"0,"


def test_a_process_of_multiprocessing_leaves_the_store_to_the_others():
    assert forked_ranks(ask_the_store_that_is_left, first=0) == [3, 0]


def clean_up_in_a_handler(manager, other_has_ended):
    def end(*_):
        manager.cleanup()
        sys.exit(3)

    if manager.rank == 1:
        assert other_has_ended.wait(60)
        return
    watchdog = threading.Timer(60, os._exit, (4,))  # if it hangs
    watchdog.daemon = True
    watchdog.start()
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # seconds; the other rank does not come
    manager.barrier()


def test_the_handler_of_a_signal_may_clean_up_in_the_middle_of_a_barrier():
    assert forked_ranks(clean_up_in_a_handler, first=0) == [3, 0]
