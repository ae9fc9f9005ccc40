"""The barrier over a store in memory: all that came hear the same, and what that costs does not grow with the ranks."""

import dataclasses
import functools
import random
import re
from collections import Counter

import pytest

from distman._base import timing
from distman._coordination import protocol
from distman._coordination.consensus import wait_for_all
from distman._coordination.sync import StoreGroup
from distman.errors import BarrierTimeoutError, JobFailed, RankFailedError
from tests.store.stores import open_store

from ..store.stores import MemoryStore
from . import ranks
from .ranks import at_once, leave, places


@pytest.fixture(params=["memory", "unix"])
def store_groups(request):
    if request.param == "memory":
        yield ranks.store_groups
        return
    with open_store(request.param) as opened:
        yield functools.partial(ranks.store_groups, opened=opened)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_barrier_opens_when_all_have_come_and_leaves_no_keys(store_groups, num_ranks):
    groups = store_groups(num_ranks)
    come = [functools.partial(wait_for_all, group, "barrier 0", timeout=10) for group in groups]
    assert at_once(*come) == [None] * num_ranks
    assert groups[0].store.num_keys() == 0


def test_all_that_came_to_a_barrier_learn_who_did_not(store_groups):
    first, second, _ = store_groups(3)
    results = at_once(
        lambda: wait_for_all(first, "barrier 0", timeout=0.05, locate=lambda ranks: dict.fromkeys(ranks, "in main")),
        lambda: wait_for_all(second, "barrier 0", timeout=60),
    )
    for error in results:
        assert isinstance(error, BarrierTimeoutError)
        assert "barrier 0 failed: within 0.05 s, 1 of 3 ranks did not come: rank 2 (n1, pid 102), in main" in str(error)


def test_a_rank_that_comes_after_the_others_gave_up_is_told(store_groups):
    first, second = store_groups(2)
    with pytest.raises(BarrierTimeoutError):
        wait_for_all(first, "barrier 0", timeout=0)
    with pytest.raises(RankFailedError, match=r"rank 0 .* raised BarrierTimeoutError"):
        wait_for_all(second, "barrier 0", timeout=60)


def test_ranks_at_two_barriers_miss_each_other(store_groups):
    first, second = store_groups(2)
    results = at_once(
        lambda: wait_for_all(first, "barrier 0 'a'", timeout=0.05),
        lambda: wait_for_all(second, "barrier 0 'b'", timeout=0.05),
    )
    assert [type(error) for error in results] == [BarrierTimeoutError] * 2


def test_barriers_at_once_know_their_own_ranks(store_groups):
    """Groups of other ranks use the same part of the store, as those of each host do; so may threads of one rank."""
    whole = store_groups(4)
    halves = [
        dataclasses.replace(whole[rank], rank=rank % 2, ranks=range(rank - rank % 2, rank - rank % 2 + 2))
        for rank in range(4)
    ]
    results = at_once(
        lambda: wait_for_all(halves[0], "first use of 0, 1", timeout=0.3),
        lambda: wait_for_all(halves[2], "first use of 2, 3", timeout=0.3),
        *(functools.partial(wait_for_all, group, "barrier 0", timeout=0.3) for group in whole[:3]),
    )
    late = ["rank 1 (n1, pid 101)", "rank 3 (n1, pid 103)", *["rank 3 (n1, pid 103)"] * 3]
    for error, rank in zip(results, late, strict=True):
        assert isinstance(error, BarrierTimeoutError)
        assert f"ranks did not come: {rank}. See what" in str(error)


def test_that_a_rank_left_is_told_to_all(store_groups):
    first, second, third = store_groups(3)
    leave(first.job_store, 2)
    results = at_once(*(functools.partial(wait_for_all, group, "barrier 0", timeout=60) for group in (first, second)))
    for error in results:
        assert isinstance(error, JobFailed)
        assert (error.rank, error.error_type) == (2, "left")
    with pytest.raises(JobFailed, match="left the job"):
        wait_for_all(third, "barrier 0", timeout=60)


def test_who_looks_without_an_answer_is_relieved(store_groups, monkeypatch):
    monkeypatch.setattr(timing, "BARRIER_LOOK", 0.0)
    group, *_ = store_groups(3)
    group.store.set(protocol.late("barrier 0"), "1")  # and is stopped, or dead
    with pytest.raises(BarrierTimeoutError, match="2 of 3 ranks did not come"):
        wait_for_all(group, "barrier 0", timeout=0.0)


@pytest.mark.parametrize("seed", range(12))
def test_all_that_come_hear_the_same(store_groups, seed):
    """Ranks come at any time with any limit, or leave; who comes passes with all others, or hears what they hear."""
    rng = random.Random(seed)  # noqa: S311 - it draws no secrets
    groups = store_groups(rng.randint(2, 6))
    fates = {group.rank: rng.choice(["comes", "comes", "comes", "leaves", "stays away"]) for group in groups}
    moments = {group.rank: rng.choice([0.0, 0.02, 0.04]) for group in groups}
    limits = {group.rank: rng.choice([0.0, 0.02, 0.04]) for group in groups}

    def go(group):
        group.wait_until(lambda: False, place="a moment", awaited=list, timeout=moments[group.rank])
        if fates[group.rank] == "leaves":
            leave(group.job_store, group.rank)
        if fates[group.rank] == "comes":
            wait_for_all(group, "barrier 0", timeout=limits[group.rank])

    results = at_once(*(functools.partial(go, group) for group in groups))
    heard = {cause(results[rank]) for rank, fate in fates.items() if fate == "comes"}
    assert len(heard) <= 1, f"{fates} {moments} {limits}"
    assert None not in heard or set(fates.values()) == {"comes"}


def cause(error):
    """What was heard, whether as the error of the barrier or as that of a rank which gave up."""
    text = re.sub(r".* raised BarrierTimeoutError: ", "", str(error)).partition("\n")[0]
    return text if error is not None else None


class CountingStore(MemoryStore):
    """Counts what is asked, without the looks at the outcome: how many there are depends on the time they wait."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def check(self, keys):
        if keys != [protocol.outcome("barrier 1")]:
            self.asked["check"] += 1
        return super().check(keys)


for name in ("add", "append", "compare_set", "delete_key", "get", "multi_get", "set"):

    def method(self, *arguments, name=name):
        self.asked[name] += 1
        return getattr(MemoryStore, name)(self, *arguments)

    setattr(CountingStore, name, method)


def calls_per_rank(num_ranks, end):
    """The calls of a barrier at which one rank of many does not come."""
    store = CountingStore()
    groups = [
        StoreGroup(store, store, rank, range(num_ranks), places(num_ranks), look_around_every=60.0, leaving=0.0)
        for rank in range(num_ranks)
    ]
    end(store, num_ranks - 1)
    errors = at_once(*(functools.partial(wait_for_all, group, "barrier 1", timeout=0.2) for group in groups[:-1]))
    assert len(set(map(cause, errors))) == 1
    return sum(store.asked.values()) / num_ranks


@pytest.mark.parametrize("end", [lambda _store, _rank: None, leave], ids=["missing", "left"])
def test_what_a_barrier_that_fails_costs_does_not_grow_with_the_ranks(end):
    assert max(calls_per_rank(num_ranks, end) for num_ranks in (25, 100)) < 25
