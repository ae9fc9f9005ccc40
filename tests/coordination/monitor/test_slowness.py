"""Which rank is slow, by times that the test makes up, over a store in memory."""

import json
import logging
import random

import pytest

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.monitor import slowness
from distman._coordination.monitor.slowness import SlownessWatch, SlowRank, slow_ranks

from ...store.stores import MemoryStore
from ..ranks import places

STEP = {"loading": 20.0, "forward": 30.0, "backward": 40.0, "computing": 10.0}


class Job:
    """Ranks that wait for each other in each step, so that all of them take equally long."""

    def __init__(self, monkeypatch, num_ranks):
        self.store, self.num_ranks, self.own = MemoryStore(), num_ranks, None
        self.watches = [SlownessWatch(rank, places(num_ranks)) for rank in range(num_ranks)]
        monkeypatch.setattr(slowness, "current", lambda: self)
        monkeypatch.setattr(timing, "SLOW_EVERY_PER_RANK", 0.0)

    def read(self, _steps, _seconds):
        return self.own

    def take_window(self, slow=None, *, noise=lambda: 1.0, waits=True):
        """Let all ranks take some steps; slow is a dict from rank and phase to the factor."""
        slow = slow or {}
        steps = [
            [seconds * slow.get((rank, phase), 1.0) * noise() for phase, seconds in STEP.items()]
            for rank in range(self.num_ranks)
        ]
        longest = max(map(sum, steps))
        for rank in reversed(range(self.num_ranks)):
            self.own = [*steps[rank], longest - sum(steps[rank]) if waits else 0.0, 0.0]
            self.watches[rank].look(self.store)

    def found(self):
        hosts = [place.host for place in places(self.num_ranks)]
        return [(one.rank, one.phase, one.factor) for one in slow_ranks(self.store, hosts)]


@pytest.fixture
def job(monkeypatch):
    return lambda num_ranks: Job(monkeypatch, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("phase", STEP)
@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_rank_is_named_after_six_windows_and_once(job, caplog, num_ranks, phase, waits):
    ranks, slow = job(num_ranks), {(1, phase): 1.6}
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            ranks.take_window(slow, waits=waits)
            assert ranks.found() == []
        for _ in range(5):
            ranks.take_window(slow, waits=waits)
            assert ranks.found() == [(1, phase, 1.6)]
        assert slow_ranks(ranks.store, ["a", "b"]) == (SlowRank(1, "b", phase, 1.6),)
        for _ in range(3):
            ranks.take_window()
            assert ranks.found() == [(1, phase, 1.6)]
        for _ in range(6):
            ranks.take_window()
            assert ranks.found() == []
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1 (n1, pid 101) is slow: {phase} takes 1.60 times as long as on the other ranks",
        "rank 1 (n1, pid 101) is not slow any more",
    ]


def test_a_rank_that_becomes_slow_is_named_after_four_windows(job):
    ranks = job(2)
    for _ in range(20):
        ranks.take_window()
    for number in range(4):
        assert ranks.found() == [], number
        ranks.take_window({(0, "forward"): 1.3})
    assert ranks.found() == [(0, "forward", 1.3)]


def test_a_rank_whose_reason_changes_is_named_again(job, caplog):
    ranks = job(2)
    with caplog.at_level(logging.INFO):
        for phase in ("loading", "backward"):
            for _ in range(6):
                ranks.take_window({(0, phase): 1.5})
            assert ranks.found() == [(0, phase, 1.5)]
    assert len(caplog.records) == 3


def test_two_slow_ranks_of_five_are_both_named(job):
    ranks = job(5)
    for _ in range(6):
        ranks.take_window({(0, "loading"): 1.5, (3, "backward"): 1.45})
    assert ranks.found() == [(0, "loading", 1.5), (3, "backward", 1.45)]


@pytest.mark.parametrize(
    "slow", [{(1, "computing"): 1.3}, {(1, "loading"): 1.1}, {(1, "loading"): 1.5, (0, "forward"): 1.4}]
)
def test_what_holds_up_nobody_is_not_named(job, slow):
    ranks = job(2)
    for _ in range(8):
        ranks.take_window(slow)
    assert ranks.found() == []


def test_windows_that_are_not_in_a_row_name_nobody(job):
    ranks = job(3)
    for number in range(40):
        ranks.take_window({(2, "forward"): 2.0} if number % 3 else {})
    assert ranks.found() == []


def test_ranks_that_do_not_train_are_left_out(job):
    ranks = job(3)
    silent = ranks.watches.pop(1)
    assert silent is not None
    ranks.num_ranks, ranks.watches = 2, [ranks.watches[0], ranks.watches[1]]
    for _ in range(6):
        ranks.take_window({(1, "loading"): 1.5})
    assert json.loads(ranks.store.get(protocol.SLOW_RANKS)) == [[2, "loading", 1.5]]


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_a_tenth_names_nobody_and_hides_nobody(job, seed):
    chance = random.Random(seed)  # noqa: S311 - it draws no secrets
    balanced, unbalanced = job(2), job(4)
    for _ in range(200):
        balanced.take_window(noise=lambda: chance.gauss(1.0, 0.1))
        assert balanced.found() == []
    for _ in range(40):
        unbalanced.take_window({(3, "backward"): 1.3}, noise=lambda: chance.gauss(1.0, 0.05))
    assert [(rank, phase) for rank, phase, _ in unbalanced.found()] == [(3, "backward")]
