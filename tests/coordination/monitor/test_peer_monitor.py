"""One look at the other ranks, over a store in memory."""

import threading

import pytest

from distman._coordination import protocol, tracking
from distman._coordination.failure.record import SILENT, FailureRecord
from distman._coordination.monitor.context import WatchContext
from distman._coordination.monitor.hang import HangWatch, StackQueries, ask_where
from distman._coordination.monitor.peer_monitor import PeerMonitor, read_sign

from ...store.stores import MemoryStore
from ..ranks import at_once, failure_on, places


class Ranks:
    """The monitors of some ranks, on a clock that the test sets."""

    def __init__(self, num_ranks, silence, world_size):
        self.store, self.seconds = MemoryStore(), 0.0
        contexts = [
            WatchContext(self.store, "tcp://n1:5", rank, places(world_size), opener=0) for rank in range(num_ranks)
        ]
        self.monitors = [
            PeerMonitor(self.store, context, silence, HangWatch(context, 3600.0, 0.0), clock=lambda: self.seconds)
            for context in contexts
        ]

    def look(self, rank=0):
        return self.monitors[rank].look()

    def number(self, key):
        return self.store.add(key, 0)


def make_ranks(num_ranks=2, *, silence=300.0, world_size=None):
    return Ranks(num_ranks, silence, world_size or num_ranks)


def test_where_nothing_happens_nothing_is_found():
    ranks = make_ranks()
    assert [ranks.look(rank) for rank in (0, 1, 0, 1)] == [None] * 4
    assert ranks.store.get(protocol.beat(1)).decode().partition(" ")[0]
    assert ranks.number(protocol.NEWS) == 0


def test_a_failure_is_found_once_there_is_news():
    ranks = make_ranks()
    failure_on(1).publish(ranks.store)
    assert ranks.look() is None
    ranks.store.add(protocol.NEWS, 1)
    assert ranks.look() == failure_on(1)
    assert ranks.number(protocol.FAILURE_SEEN) == 1


def test_the_rank_that_holds_the_store_is_let_go():
    ranks = make_ranks()
    ranks.store.set(protocol.CLOSING, "yes")
    ranks.store.add(protocol.NEWS, 1)
    assert ranks.look() is None
    assert ranks.monitors[0].is_closing
    assert ranks.number(protocol.GONE) == 1


def test_a_query_is_answered():
    ranks = make_ranks()
    done = threading.Event()

    def ask():
        try:
            return ask_where(ranks.store, [1], 60)
        finally:
            done.set()

    def answer():
        while not done.is_set():
            assert ranks.look(1) is None

    answers, _ = at_once(ask, answer)
    assert "test_peer_monitor.py" in answers[1].stacks
    assert not ranks.store.check([protocol.answer(1, 1)])


def test_an_answer_for_which_nobody_waits_any_more_leaves_nothing_in_the_store():
    store = MemoryStore()
    assert ask_where(store, [1], 0.0) == {}
    num_keys = store.num_keys()
    StackQueries(store, 1).answer()
    assert store.num_keys() == num_keys


class DeletingStore(MemoryStore):
    """A store in which each key is deleted right after it was found."""

    def check(self, keys):
        is_there = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return is_there

    def get(self, key):
        raise AssertionError(f"{key!r} is gone, so this waits for the store's timeout")


def test_what_another_rank_deletes_meanwhile_is_not_waited_for():
    store = DeletingStore()
    store.set(protocol.beat(1), "1700000000.0 in barrier at train.py:3")
    assert read_sign(store, 1).endswith("in barrier at train.py:3")
    store.append(protocol.queries(1), "1,")
    store.add(protocol.answered(1), 0)
    StackQueries(store, 1).answer()
    assert store.add(protocol.answered(1), 0) == 1


def test_a_path_that_is_no_text_is_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(tracking, "describe_here", lambda _more: "in barrier at /data/\udcff/train.py:3")
    ranks = make_ranks()
    assert ranks.look() is None
    assert read_sign(ranks.store, 0).endswith(r"in barrier at /data/\udcff/train.py:3")


def looks_at(ranks, *moments):
    found = []
    for ranks.seconds in moments:
        found.append(ranks.look())
    return found


def test_a_rank_that_gives_no_sign_of_life_is_told_of():
    ranks = make_ranks()
    ranks.look(1)
    *found, last = looks_at(ranks, *range(0, 304, 2))
    assert found == [None] * len(found)
    assert (last.rank, last.error_type) == (1, SILENT)
    assert FailureRecord.read(ranks.store) == last


def test_a_rank_that_has_left_is_passed_over():
    ranks = make_ranks(3)
    ranks.look(1)
    ranks.look(2)
    ranks.store.set(protocol.left(1), "yes")
    *found, last = looks_at(ranks, *range(0, 304, 2))
    assert found == [None] * len(found)
    assert (last.rank, last.error_type) == (2, SILENT)


def test_the_last_rank_watches_nobody():
    ranks = make_ranks()
    ranks.look(1)
    ranks.store.set(protocol.left(1), "yes")
    assert set(looks_at(ranks, *range(0, 1000, 2))) == {None}


def test_the_failure_that_was_told_first_counts():
    ranks = make_ranks()
    ranks.look(1)
    failure_on(1).publish(ranks.store)
    assert looks_at(ranks, *range(0, 304, 2))[-1] == failure_on(1)


def test_a_rank_that_gives_signs_of_life_is_not():
    ranks = make_ranks()
    for ranks.seconds in range(0, 1000, 2):
        assert ranks.look(1) is None
        assert ranks.look(0) is None


@pytest.mark.parametrize(("world_size", "interval"), [(2, 0.2), (10_000, 4.0)])
def test_a_rank_is_not_silent_between_its_signs_of_life(world_size, interval):
    ranks = make_ranks(silence=0.5, world_size=world_size)
    ranks.look(1)
    for number in range(60):
        ranks.seconds = number * 1.1 * interval
        assert ranks.look(0) is None
        assert ranks.look(1) is None
    found = looks_at(ranks, *(ranks.seconds + number * interval for number in range(30)))
    assert next(record.rank for record in found if record is not None) == 1, "it gives none any more"


def test_a_rank_that_is_not_watching_is_not_silent():
    ranks = make_ranks()
    assert set(looks_at(ranks, *range(0, 1000, 2))) == {None}


def test_a_rank_that_was_suspended_itself_accuses_nobody():
    ranks = make_ranks()
    ranks.look(1)
    assert looks_at(ranks, 0, 2, 5_000, 10_000) == [None] * 4
