"""A rank that fails tells the others, as far as the store is still there."""

import contextlib
import errno
import os
import resource
import sys
import threading

import pytest
import torch.distributed as dist

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.failure import hook, reporter as module
from distman._coordination.failure.record import SILENT, FailureRecord
from distman._coordination.failure.reporter import JobReporter

from ...store.stores import MemoryStore
from ..ranks import Place, failure_on


@pytest.fixture
def store():
    return MemoryStore()


def reporter(store, *, num_others=1, look_after=lambda _: None):
    done = []
    made = JobReporter(
        rank=0,
        num_others=num_others,
        store=store,
        store_host="the process at tcp://n1:5",
        leave_group=lambda: done.append("left the group"),
        abort_job=done.append,
        look_after=look_after,
    )
    return made, done


@pytest.mark.parametrize("error", [ValueError("boom"), FailureRecord.silent(Place(1), 300).to_failure()], ids=repr)
def test_after_the_end_of_the_program_it_is_looked_who_keeps_the_launcher_waiting(store, error):
    looked_for = []
    report, _ = reporter(store, look_after=looked_for.append)
    finish = report(error)
    assert looked_for == []
    finish()
    assert [record.error_text for record in looked_for] == [FailureRecord.of(error, 0).error_text]


def test_who_has_told_of_a_failure_counts_as_one_that_knows(store):
    """Its watcher may not come to say so, since the process ends."""
    store.set(protocol.beat(0), "now")
    report, _ = reporter(store)
    report(failure_on(1).to_failure())
    assert not store.check([protocol.beat(0)])


def test_the_others_are_told(store, capsys):
    report, done = reporter(store)
    error = ValueError("boom")
    finish = report(error)
    record = FailureRecord.read(store)
    assert (record.rank, record.error_type, record.error_text) == (0, "ValueError", "boom")
    assert (store.add(protocol.NEWS, 0), store.add(protocol.FAILURE_SEEN, 0)) == (1, 0), "it counts the others"
    assert record.is_told_by(done[0])
    finish()
    assert capsys.readouterr().err == ""


def test_a_failure_that_came_first_is_printed(store, capsys):
    failure_on(1).publish(store)
    report, _ = reporter(store)
    report(RuntimeError("gloo"))()
    assert FailureRecord.read(store) == failure_on(1)
    assert "distman: the job failed first elsewhere: rank 1 (n1, pid 101) raised ValueError" in capsys.readouterr().err


@pytest.mark.parametrize("error", [failure_on(1).to_failure(), KeyboardInterrupt()])
def test_what_the_user_knows_already_is_not_said_again(store, capsys, error):
    failure_on(1).publish(store)
    report, _ = reporter(store)
    report(error)()
    assert capsys.readouterr().err == ""


def test_a_silent_rank_is_not_told_of_over_a_store_that_may_be_its_own(store):
    report, _ = reporter(store)
    report(FailureRecord.silent(Place(1), 300).to_failure())()
    assert FailureRecord.read(store) is None
    assert FailureRecord.silent(Place(1), 300).error_type == SILENT


class Lost(MemoryStore):
    def compare_set(self, *_):
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_is_gone_is_named(capsys):
    report, done = reporter(Lost())
    report(ValueError("boom"))()
    assert done[0].error_text == "boom"
    assert "the process at tcp://n1:5, which serves the job's store, is gone, or" in capsys.readouterr().err


@pytest.fixture
def tcp_store():
    """A connection to a real store, which is here too."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server


@contextlib.contextmanager
def opening_nothing():
    """For the length of a ``with`` block, this process can open nothing; what is open stays."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def test_a_store_that_does_not_answer_holds_nothing_up(capsys, monkeypatch):
    is_over = threading.Event()

    class Stopped(MemoryStore):
        def check(self, _):
            return not is_over.wait()

        def compare_set(self, *_):
            is_over.wait()
            raise dist.DistNetworkError("Broken pipe")

    store = Stopped()
    monkeypatch.setattr(timing, "PUBLISH", 0.01)
    monkeypatch.setattr(module, "late_after", lambda _: 0.0)
    monkeypatch.setattr(module, "failure_behind", lambda _: FailureRecord.read(store))
    hook.install(lambda _: None)
    report, _ = reporter(store)
    report(dist.DistNetworkError("Connection reset by peer"))()
    is_over.set()
    assert "is gone, or does not answer. See its error" in capsys.readouterr().err
    assert len(hook._hook.actions) == 1, "a thread is left in the store"
    hook.uninstall()


def test_a_rank_that_can_open_nothing_any_more_is_heard(tcp_store):
    report, _ = reporter(tcp_store)
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with opening_nothing():
        report(error)()
    assert FailureRecord.read(tcp_store).error_text == str(error)


class BrokenError(RuntimeError):
    """A program's error of which nothing can be asked."""

    def __str__(self):
        sys.exit("no text")

    @property
    def __cause__(self):
        raise KeyboardInterrupt


def test_an_error_that_says_nothing_is_told_all_the_same(store):
    report, _ = reporter(store)
    try:
        raise BrokenError
    except BrokenError as error:
        report(error)()
    record = FailureRecord.read(store)
    assert record.error_text == "(its __str__ raised SystemExit)"
    assert "to show them raised KeyboardInterrupt" in record.traceback_text
    assert record.traceback_text.endswith("BrokenError: (its __str__ raised SystemExit)\n")


def test_a_rank_leaves_its_group_and_stays_until_all_know(store, monkeypatch):
    """A launcher ends the others as soon as it ends."""
    monkeypatch.setattr(module, "is_watching", lambda: True)
    monkeypatch.setattr(timing, "STAY_TO_BE_READ", 60)
    report, done = reporter(store, num_others=2)
    finish = report(ValueError("boom"))
    assert FailureRecord.read(store).error_text == "boom"
    assert len(done) == 1
    store.add(protocol.GONE, 1)
    ending = threading.Thread(target=finish)
    ending.start()
    ending.join(timeout=0.2)
    assert ending.is_alive()
    store.add(protocol.FAILURE_SEEN, 1)
    ending.join(timeout=10)
    assert not ending.is_alive()
    assert done[1:] == ["left the group"]
