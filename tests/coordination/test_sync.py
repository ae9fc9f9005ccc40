"""Waits, barriers, and keys that are deleted after use and never before, over a store in memory."""

import functools
import random

import pytest
from torch.distributed import HashStore

from distman._coordination import protocol
from distman._coordination.sync import KeySequence, wait_for_all
from distman.errors import BarrierTimeoutError, RankFailedError

from .ranks import at_once, failure_on, store_groups


@pytest.mark.parametrize("seed", range(20))
def test_a_key_lives_until_all_have_gone_on(seed):
    rng = random.Random(seed)  # noqa: S311 - it draws no secrets
    num_ranks = rng.randint(1, 4)
    store = HashStore()
    ranks = [KeySequence(store, "act", num_ranks, beside=[protocol.done]) for _ in range(num_ranks)]
    keys = [[] for _ in ranks]
    for _ in range(2_000):
        rank = rng.randrange(num_ranks)
        key = ranks[rank].next()
        assert store.compare_set(key, "", "written") == b"written"
        store.add(protocol.done(key), 1)
        keys[rank].append(key)
        assert all(store.check([mine[-1]]) for mine in keys if mine), "who is still there can read"
    assert all(mine == keys[0][: len(mine)] or keys[0] == mine[: len(keys[0])] for mine in keys)
    spread = max(map(len, keys)) - min(map(len, keys))
    assert store.num_keys() <= 2 * (spread + 3 * 64)


def test_the_page_before_is_gone_when_the_last_rank_begins_the_next_but_one():
    store = HashStore()
    first, last = (KeySequence(store, "act", 2) for _ in range(2))
    keys = [first.next() for _ in range(3 * 64)]
    for key in keys:
        store.set(key, "written")
    assert [last.next() for _ in range(64)] == keys[:64]
    assert store.check(keys), "the last rank may still read its last key"
    assert last.next() == keys[64]
    assert not any(store.check([key]) for key in keys[:64])
    assert store.check(keys[64:])


def wait(group, *, awaited=(), timeout=0.05, **options):
    return group.wait_until(lambda: False, place="the gate", awaited=lambda: awaited, timeout=timeout, **options)


def test_what_is_there_is_not_waited_for():
    group, _ = store_groups(2)
    assert group.wait_until(lambda: True, place="the gate", awaited=lambda: [1], timeout=0)


def test_a_wait_has_an_end():
    group, _ = store_groups(2)
    assert not wait(group, awaited=[1])


def test_a_failure_of_another_rank_ends_the_wait():
    group, _ = store_groups(2)
    failure_on(1).publish(group.job_store)
    with pytest.raises(RankFailedError, match=r"rank 1 .* raised ValueError: boom"):
        wait(group, timeout=None)


def test_a_failure_of_this_rank_does_not():
    group, _ = store_groups(2)
    failure_on(0).publish(group.job_store)
    assert not wait(group)


def leave(store, rank):
    store.set(protocol.left(rank), "yes")
    store.add(protocol.LEFT, 1)


def test_an_awaited_rank_that_left_ends_the_wait():
    group, *_ = store_groups(3)
    leave(group.job_store, 2)
    assert not wait(group, awaited=[1])
    with pytest.raises(RankFailedError, match=r"rank 2 .* left the job before it came to the gate"):
        wait(group, awaited=[1, 2], timeout=None)


def test_a_rank_that_left_is_waited_for_a_while_longer():
    group, _ = store_groups(2, leaving=60.0)
    leave(group.job_store, 1)
    assert not wait(group, awaited=[1])


def test_what_came_before_a_rank_left_counts():
    group, _ = store_groups(2)
    leave(group.job_store, 1)
    looks = iter([False])
    assert group.wait_until(lambda: next(looks, True), place="the gate", awaited=lambda: [1])


def test_what_a_look_raises_ends_the_wait():
    group, _ = store_groups(2)

    def look():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        wait(group, look=look)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_barrier_opens_when_all_have_come_and_leaves_no_keys(num_ranks):
    groups = store_groups(num_ranks)
    come = [functools.partial(wait_for_all, group, "barrier 0", timeout=10) for group in groups]
    assert at_once(*come) == [None] * num_ranks
    at = {protocol.at(rank) for rank in range(num_ranks)}
    assert all(groups[0].store.check([key]) for key in at)
    assert groups[0].store.num_keys() - len(at) == groups[0].store.check([protocol.LEFT])  # a look makes that counter


def test_all_that_came_to_a_barrier_learn_who_did_not():
    first, second, _ = store_groups(3)
    results = at_once(
        lambda: wait_for_all(first, "barrier 0", timeout=0.05, locate=lambda ranks: dict.fromkeys(ranks, "in main")),
        lambda: wait_for_all(second, "barrier 0", timeout=60),
    )
    for error in results:
        assert isinstance(error, BarrierTimeoutError)
        assert "barrier 0 failed: within 0.05 s, 1 of 3 ranks did not come: rank 2 (n1, pid 102), in main" in str(error)


def test_a_rank_that_comes_after_the_others_gave_up_is_told():
    first, second = store_groups(2)
    with pytest.raises(BarrierTimeoutError):
        wait_for_all(first, "barrier 0", timeout=0)
    with pytest.raises(RankFailedError, match=r"rank 0 .* raised BarrierTimeoutError"):
        wait_for_all(second, "barrier 0", timeout=60)


def test_ranks_at_two_barriers_miss_each_other():
    first, second = store_groups(2)
    results = at_once(
        lambda: wait_for_all(first, "barrier 0 'a'", timeout=0.05),
        lambda: wait_for_all(second, "barrier 0 'b'", timeout=0.05),
    )
    assert [type(error) for error in results] == [BarrierTimeoutError] * 2
