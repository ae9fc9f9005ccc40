"""The agreed stop, with ranks that come in any order."""

import logging
import os
import random
import signal
import threading
import weakref

import numpy as np
import pytest
import torch

from distman._base import timing
from distman._coordination import preemption
from distman._coordination.preemption import StopAgreement
from distman._coordination.stop_signals import DEFAULT_SIGNALS
from distman._coordination.sync import StoreGroup
from distman.errors import PlanMismatchError

from ..store.stores import MemoryStore

_to_leave = []


def agreements(num_ranks):
    store = MemoryStore()
    names = [f"rank {rank} (n1, pid {rank})" for rank in range(num_ranks)]
    ranks = [StopAgreement(StoreGroup(store, store, rank, range(num_ranks), names)) for rank in range(num_ranks)]
    _to_leave.extend(ranks)
    return store, ranks


@pytest.fixture(autouse=True)
def many_looks(monkeypatch):
    """Look for a stop all the time: the ranks of a test make their steps within milliseconds."""
    monkeypatch.setattr(timing, "STOP_EVERY", 0.001)
    yield
    while _to_leave:
        _to_leave.pop().leave()


@pytest.mark.parametrize("seed", range(30))
def test_all_stop_at_the_same_step_whoever_asks_and_whoever_is_ahead(seed):
    rng = random.Random(seed)  # noqa: S311 - it draws no secrets
    num_ranks, stride = rng.randint(1, 5), rng.choice([1, 1, 10])
    _, ranks = agreements(num_ranks)
    steps, stopped = [0] * num_ranks, [None] * num_ranks
    asks_at, most_ahead = rng.randint(0, 300), rng.choice([1, 3, 1000])
    for turn in range(100_000):
        if turn == asks_at:
            ranks[rng.randrange(num_ranks)].request()
        running = [rank for rank in range(num_ranks) if stopped[rank] is None]
        if not running:
            break
        rank = rng.choice(running)
        if turn > num_ranks and steps[rank] > min(steps[other] for other in running) + most_ahead * stride:
            continue  # collectives keep the ranks of a real job together
        if turn < num_ranks:
            rank = turn  # a rank that has not begun is waited for
        if ranks[rank].decide(steps[rank]):
            stopped[rank] = steps[rank]
        steps[rank] += stride
    assert None not in stopped
    assert len(set(stopped)) == 1


@pytest.mark.parametrize("kind", [np.int64, np.int32, torch.tensor])
def test_a_step_may_be_a_number_of_another_library(kind):
    _, (agreement,) = agreements(1)
    assert not agreement.decide(kind(0))
    agreement.request()
    assert any(agreement.decide(kind(step)) for step in range(1, 100_000))
    for wrong in (kind, 1.5, torch.tensor(1.5), "3"):
        with pytest.raises(TypeError, match="step must be a whole number"):
            agreement.decide(wrong)


def test_a_rank_that_computes_or_waits_for_another_one_answers_meanwhile():
    _, (first, second) = agreements(2)
    for rank, step in ((first, 0), (second, 0), (second, 1)):
        assert not rank.decide(step)
    first.request()
    for rank in (first, second):
        rank._thread.join()
    assert not first.decide(1)  # rank 1 may be in a collective of the next step, and waits for this one
    assert first.decide(2)
    assert second.decide(2)


def test_a_rank_that_has_left_is_not_waited_for():
    _, (first, second) = agreements(2)
    for step in range(3):
        assert not second.decide(step)
    second.leave()
    assert not first.decide(0)
    first.request()
    first._thread.join()
    assert [first.decide(step) for step in (1, 2, 3)] == [False, False, True]


def test_after_the_stop_the_answer_stays(caplog):
    _, (rank,) = agreements(1)
    assert not rank.decide(0)
    rank.request()
    rank._thread.join()  # the answer of this rank is with the others
    with caplog.at_level(logging.INFO):
        assert [rank.decide(step) for step in (1, 2, 3)] == [True, True, True]
    assert [record.getMessage() for record in caplog.records] == ["all ranks stop at step 1: request_stop()"]


def test_the_exit_code_that_asks_for_another_start_is_no_failure_after_an_agreed_stop(monkeypatch):
    expected = []
    monkeypatch.setattr(preemption.hook, "expect_exits", expected.append)
    _, (rank,) = agreements(1)
    assert not rank.decide(0)
    rank.request()
    rank._thread.join()
    assert expected == []
    assert rank.decide(1)
    assert expected == [75]


def test_a_program_alone_stops_at_once():
    alone = StopAgreement(None)
    assert not alone.decide(0)
    alone.request()
    assert alone.decide(1)


def test_steps_that_begin_anew_are_refused():
    _, (rank,) = agreements(1)
    rank.decide(7)
    rank.decide(7)
    with pytest.raises(ValueError, match="step must not be smaller than the one before, 7, got 0"):
        rank.decide(0)


def test_steps_without_a_number_are_counted():
    agreement = StopAgreement(None)
    assert not agreement.decide(4)
    assert not agreement.decide()
    with pytest.raises(ValueError, match="step must not be smaller than the one before, 5, got 4"):
        agreement.decide(4)


def test_ranks_that_ask_at_different_steps_are_told():
    _, (first, second) = agreements(2)
    first.decide(5)
    with pytest.raises(PlanMismatchError, match=r"got 6 on rank 1 \(n1, pid 1\) and 5 on another"):
        second.decide(6)


def test_ranks_that_stop_at_different_steps_are_told():
    _, (first, second) = agreements(2)
    assert not first.decide(0)
    assert not second.decide(0)
    first.request()
    first._thread.join()
    assert first.decide(1)
    with pytest.raises(PlanMismatchError, match=r"got 2 on rank 1 \(n1, pid 1\) and 1 on another"):
        second.decide(2)


def test_a_step_asks_nobody():
    """A stop is looked for by the time that has passed, whatever the number of steps."""
    _, (rank,) = agreements(1)
    assert not rank.decide(0)
    rank._store_group = object()  # of which nothing can be asked
    assert not any(rank.decide(step) for step in range(1, 10_000))


@pytest.fixture
def seen():
    """The signals that the program's own handlers saw."""
    numbers = []
    before = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in DEFAULT_SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def restore_elsewhere(agreement):
    """Leave the job in another thread than the main one."""
    thread = threading.Thread(target=agreement.restore)
    thread.start()
    thread.join()


def test_a_signal_asks_for_a_stop_and_reaches_the_handler_before(seen):
    agreement = StopAgreement(None)
    agreement.listen()
    signal.raise_signal(signal.SIGTERM)
    assert agreement.decide()
    agreement.restore()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGTERM, signal.SIGUSR1]


def test_after_an_end_in_another_thread_signals_mean_what_they_meant(seen):
    for count in range(1, 4):
        agreement = StopAgreement(None)
        agreement.listen()
        restore_elsewhere(agreement)
        signal.raise_signal(signal.SIGTERM)
        assert not agreement.decide()
        assert len(seen) == 2 * count - 1
        later = StopAgreement(None)
        later.listen()
        signal.raise_signal(signal.SIGTERM)
        assert later.decide()
        assert len(seen) == 2 * count
        later.restore()


@pytest.mark.usefixtures("seen")
def test_after_an_end_in_another_thread_nothing_keeps_the_store():
    store, (agreement,) = agreements(1)
    kept = weakref.ref(store)
    agreement.listen()
    restore_elsewhere(agreement)
    del store, agreement
    assert kept() is None


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("restore", [restore_elsewhere, StopAgreement.restore])
@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.SIG_IGN])
def test_after_the_end_a_signal_ends_the_process_unless_it_was_ignored(default, restore, is_wrapped):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, default)
        agreement = StopAgreement(None)
        agreement.listen()
        if is_wrapped:
            inner = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *arguments: inner(*arguments))
        restore(agreement)
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    expected = -signal.SIGTERM if default == signal.SIG_DFL else 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected


def test_a_signal_asks_the_next_job_after_an_end_in_another_thread(seen):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    agreement, later = StopAgreement(None), StopAgreement(None)
    agreement.listen()
    restore_elsewhere(agreement)
    later.listen()
    signal.raise_signal(signal.SIGTERM)
    assert later.decide()
    later.restore()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert seen == []


def test_an_ignored_signal_asks_for_a_stop_while_the_job_is_up(seen):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    agreement = StopAgreement(None)
    agreement.listen()
    signal.raise_signal(signal.SIGUSR1)
    assert agreement.decide()
    agreement.restore()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert seen == []
