"""Work with a limit, in a thread that is there before it is needed."""

import os
import threading

import pytest

from distman._coordination import timeouts
from distman._coordination.timeouts import begin, keep_threads, leave, run_with_timeout


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    timeouts._end_threads()


@pytest.fixture
def no_new_threads(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_what_is_done_in_time_is_done():
    done = []
    assert run_with_timeout(lambda: done.append(threading.get_ident()), 60.0)
    assert done != [threading.get_ident()]


def test_what_is_not_is_left_alone():
    may_end = threading.Event()
    assert not run_with_timeout(may_end.wait, 0.001)
    may_end.set()


def test_an_error_is_raised_here():
    with pytest.raises(SystemExit):
        run_with_timeout(lambda: (_ for _ in ()).throw(SystemExit), 60.0)


def test_kept_threads_serve_again_and_again(no_new_threads):
    keep_threads()
    no_new_threads()
    served = set()
    for _ in range(10):
        assert run_with_timeout(lambda: served.add(threading.get_ident()), 60.0)
    assert threading.get_ident() not in served


def test_as_many_as_are_needed_at_once_are_kept(no_new_threads):
    keep_threads()
    no_new_threads()
    threads = set()
    together = threading.Barrier(timeouts._NUM_KEPT)

    def work():
        together.wait(60)
        threads.add(threading.get_ident())

    waits = [begin(work) for _ in range(timeouts._NUM_KEPT)]
    assert all(wait(60.0) for wait in waits)
    assert len(threads) == timeouts._NUM_KEPT


def test_without_a_thread_the_work_is_done_in_this_one(no_new_threads):
    no_new_threads()
    done = []
    assert run_with_timeout(lambda: done.append(threading.get_ident()), 0.0)
    assert done == [threading.get_ident()]


def test_what_is_left_to_a_thread_is_left_out_where_there_is_none(no_new_threads):
    done = threading.Event()
    leave(done.set)
    assert done.wait(60.0)
    no_new_threads()
    done.clear()
    leave(done.set)
    assert not done.is_set()


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent():
    keep_threads()
    child = os.fork()
    if child == 0:
        os._exit(0 if run_with_timeout(lambda: None, 60.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TakenByAnother(list):
    """Threads of which another thread takes the last one whenever this one is about to."""

    def pop(self):
        self.clear()
        return super().pop()


def test_who_comes_too_late_for_a_kept_thread_has_a_new_one(monkeypatch):
    monkeypatch.setattr(timeouts, "_kept", TakenByAnother(["the last one"]))
    assert run_with_timeout(lambda: None, 60.0)


def test_threads_that_others_have_taken_are_not_ended_here(monkeypatch):
    monkeypatch.setattr(timeouts, "_kept", TakenByAnother(["the last one"]))
    timeouts._end_threads()


def test_what_nobody_waits_for_does_not_hold_up_the_end_of_the_process():
    """What bounds that end goes on until then."""
    may_end, begun = threading.Event(), dict(timeouts._under_way)
    leave(may_end.wait)
    assert timeouts._under_way == begun
    may_end.set()
