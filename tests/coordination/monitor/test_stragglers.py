"""Who keeps a launcher waiting after a failure, over a store in memory."""

import gc
import weakref

import pytest

from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import ending_of, seconds_before_turn
from distman._coordination.failure.record import FailureRecord
from distman._coordination.failure.reporter import JobReporter
from distman._coordination.monitor import stragglers
from distman._coordination.monitor.context import WatchContext, WatchLimits
from distman._coordination.monitor.peer_monitor import give_sign
from distman._coordination.monitor.stragglers import FailedJob
from distman._coordination.monitor.watcher import Watcher
from distman.environments import LaunchEnvironment
from distman.errors import JobFailed

from ...store.stores import MemoryStore
from ..ranks import failure_on, leave, places
from .test_watcher import run_until_raised

NUM_RANKS = 4
SILENT = FailureRecord.silent(places(NUM_RANKS)[1], 300)


@pytest.fixture
def store():
    return MemoryStore()


class End:
    """The end of a rank that is there: closed when its process ends."""

    def __init__(self, members, rank):
        self._members = members
        self._rank = rank
        members.append(rank)

    def close(self):
        self._members.remove(self._rank)


@pytest.fixture
def others(store):
    """The ends of ranks 1 to 3, which are there; rank 3 has not read of a failure."""
    give_sign(store, 3)
    return {rank: End(store.members, rank) for rank in range(1, NUM_RANKS)}


def context_of(store, rank=0):
    return WatchContext(store, "tcp://n1:5", rank, places(NUM_RANKS), opener=0)


def make(store, record, ended, *, silence=300.0):
    return FailedJob(context_of(store), record, silence, lambda: ended.append("ended"))


@pytest.fixture
def waits(monkeypatch):
    """What is to happen at each wait of the end of the process, in turn; nothing more may be waited for."""
    planned = []
    monkeypatch.setattr(stragglers.time, "sleep", lambda _: planned.pop(0)())
    return planned


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(stragglers, "late_after", lambda _: 0.0)


def test_nobody_is_left_where_all_have_read_of_the_failure_or_left(store):
    give_sign(store, 3)
    leave(store, 3)
    assert not make(store, failure_on(1), []).find_stragglers(store)


@pytest.mark.usefixtures("no_patience")
def test_a_rank_that_does_not_react_is_given_the_time_that_it_may_be_silent(store, others, waits):
    ended = []
    left = make(store, failure_on(1), ended, silence=0.0)
    assert left.find_stragglers(store)
    waits += [others[1].close, others[2].close]
    left.end_without_stragglers()
    assert (ended, waits) == (["ended"], [])


@pytest.mark.usefixtures("no_patience")
def test_a_rank_that_was_only_slow_ends_by_itself(store, others, waits):
    ended = []
    left = make(store, failure_on(1), ended)
    assert left.find_stragglers(store)
    waits += [others[3].close]
    left.end_without_stragglers()
    assert (ended, waits) == ([], [])


def test_a_silent_rank_is_ended_when_the_others_have_left(store, others, waits):
    ended = []
    store.delete_key(protocol.beat(3))
    left = make(store, SILENT, ended)
    assert left.find_stragglers(store)
    others[2].close()
    waits += [others[3].close]
    left.end_without_stragglers()
    assert (ended, waits) == (["ended"], [])


def test_a_silent_rank_that_is_gone_by_then_needs_no_end(store, others):
    ended = []
    store.delete_key(protocol.beat(3))
    left = make(store, SILENT, ended)
    left.find_stragglers(store)
    others[1].close()
    left.end_without_stragglers()
    assert ended == []


def test_a_silent_rank_on_a_host_that_does_not_answer_is_ended_too(store):
    ended = []
    End(store.members, 1)  # of which the store has seen no end
    left = make(store, SILENT, ended)
    assert left.find_stragglers(store)
    left.end_without_stragglers()
    assert ended == ["ended"]


def test_where_all_wait_for_one_that_died_the_job_is_ended_when_the_others_are_done(store, others, waits):
    """MPI_Finalize waits for it."""
    ended = []
    store.delete_key(protocol.beat(3))
    died = FailureRecord.died(places(NUM_RANKS)[1])
    left = FailedJob(context_of(store), died, 300.0, lambda: ended.append("ended"), is_awaited=True)
    assert left.find_stragglers(store)
    others[1].close()
    waits += [others[2].close, others[3].close]
    left.end_without_stragglers()
    assert (ended, waits) == (["ended"], [])


@pytest.mark.parametrize(("has_failed", "expected"), [(False, ["ended"]), (True, [])])
def test_where_the_store_is_silent_handlers_get_a_minute(store, waits, monkeypatch, has_failed, expected):
    ended = []
    monkeypatch.setattr(hook, "has_failed", lambda: has_failed)
    waits += [lambda: None] * len(expected)
    make(store, SILENT, ended).end_unseen()
    assert (ended, waits) == (expected, [])


def test_the_store_of_the_job_is_not_kept(store):
    """Its connections would stay open after cleanup()."""
    context = context_of(store)
    is_kept = weakref.ref(context)
    left = FailedJob(context, SILENT, 300.0, lambda: None)
    left.find_stragglers(store)
    del context
    gc.collect()
    assert is_kept() is None


@pytest.fixture
def actions(monkeypatch):
    """What is to be done at the end of this process."""
    found = []
    monkeypatch.setattr(hook, "end_job_at_exit", found.append)
    return found


def watcher_of(store, rank=0, end_job=lambda: None):
    context = context_of(store, rank)
    return Watcher(context, WatchLimits(silence=300.0), lambda _: None, end_job=end_job)


@pytest.mark.parametrize("alive", [(0, 2), (2, 0), (3,), (1, 3)], ids=str)
def test_the_first_that_asks_looks_after_the_others(store, actions, alive):
    """Any others may have died or stand still, the one that has opened the store among them."""
    for num_that_asked, rank in enumerate(alive):
        watcher = watcher_of(store, rank)
        assert len(actions) == (num_that_asked > 0)
        watcher.look_after_others(SILENT)
        watcher.stop()
        assert len(actions) == 1


def test_where_the_store_itself_is_silent_it_is_done_unseen(store, actions, monkeypatch):
    """Another rank may have been asked to, but nobody can say so."""
    store.set(protocol.JOB_ENDER, "0")
    monkeypatch.setattr(stragglers, "run_with_timeout", lambda *_: False)
    watcher = watcher_of(store, 3)
    watcher.look_after_others(SILENT)
    watcher.stop()
    assert [action.__name__ for action in actions] == ["end_unseen"]


def test_it_does_so_too_where_the_program_handles_the_failure(store, actions):
    watcher = watcher_of(store)
    SILENT.publish(store)
    store.add(protocol.NEWS, 1)
    store.add(protocol.FAILURE_SEEN, NUM_RANKS)
    with pytest.raises(JobFailed, match="silent"):
        run_until_raised(watcher)
    assert len(actions) == 1


def test_under_a_launcher_that_ends_the_rest_nobody_does(store, actions):
    watcher = watcher_of(store, end_job=None)
    watcher.look_after_others(SILENT)
    watcher.stop()
    assert actions == []


@pytest.mark.usefixtures("no_patience", "others")
def test_a_rank_that_fails_itself_looks_too(store, actions):
    watcher = watcher_of(store)
    watcher.start()
    store.add(protocol.FAILURE_SEEN, NUM_RANKS)
    report = JobReporter(
        rank=0,
        num_others=NUM_RANKS - 1,
        store=store,
        store_host="",
        leave_group=lambda: None,
        abort_job=lambda _: None,
        look_after=watcher.look_after_others,
    )
    report(ValueError("the disk is full"))()
    watcher.stop()
    assert len(actions) == 1, "rank 3 does not react"


@pytest.mark.parametrize(
    ("launcher", "is_asked"),
    [("slurm", True), ("hydra", True), ("openmpi", False), ("torchrun", False), ("env", False)],
)
def test_who_is_asked_to_end_a_job(launcher, is_asked):
    assert (ending_of(LaunchEnvironment(launcher, 0, 4)) is not None) == is_asked


def test_those_that_cancel_first_are_few_and_not_all_on_one_host():
    turns = [seconds_before_turn(rank, 1000) for rank in range(1000)]
    early = [rank for rank in range(1000) if turns[rank] < max(turns)]
    assert early == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert sorted(turns[rank] for rank in early) == sorted({turns[rank] for rank in early}), "each has its own turn"
    assert max(turns) < 10
