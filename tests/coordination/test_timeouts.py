"""Work with a limit, in another thread."""

import threading

import pytest

from distman._coordination.timeouts import leave, run_with_timeout


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
