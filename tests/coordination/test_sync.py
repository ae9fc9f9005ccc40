"""Waits, barriers, and keys that are deleted after use and never before, over a store in memory."""

import dataclasses
import functools
import random

import pytest

from distman._coordination import protocol
from distman._coordination.failure.record import LEFT
from distman._coordination.sync import KeySequence
from distman.errors import JobFailed

from ..store.stores import MemoryStore
from .ranks import at_once, failure_on, leave, store_groups


@pytest.mark.parametrize("seed", range(8))
def test_a_key_lives_until_all_have_gone_on(seed):
    rng = random.Random(seed)  # noqa: S311 - it draws no secrets
    num_ranks = rng.randint(1, 4)
    store = MemoryStore()
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
    store = MemoryStore()
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


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failure_ends_the_wait_on_all_ranks(failed):
    group, _ = store_groups(2)
    failure_on(failed).publish(group.job_store)
    with pytest.raises(JobFailed, match=rf"rank {failed} .* raised ValueError: boom"):
        wait(group, timeout=60)


def test_an_awaited_rank_that_left_ends_the_wait():
    group, *_ = store_groups(3)
    leave(group.job_store, 2)
    assert not wait(group, awaited=[1])
    with pytest.raises(JobFailed, match=r"rank 2 .* left the job before it came to the gate"):
        wait(group, awaited=[1, 2], timeout=None)


def test_a_rank_that_left_is_waited_for_a_while_longer():
    group, _ = store_groups(2, leaving=60.0)
    leave(group.job_store, 1)
    assert not wait(group, awaited=[1])


def test_what_came_before_a_rank_left_counts():
    group, _ = store_groups(2)
    leave(group.job_store, 1)
    looked = []

    def awaited():
        looked.append(True)
        return [1]

    assert group.wait_until(lambda: bool(looked), place="the gate", awaited=awaited)


def test_a_wait_that_is_over_asks_for_a_failure_before_it_says_that_nobody_came():
    group, _ = store_groups(2)
    failure_on(1).publish(group.job_store)
    with pytest.raises(JobFailed, match="boom"):
        dataclasses.replace(group, look_around_every=60.0).wait_until(
            lambda: False, place="the gate", awaited=lambda: [1], timeout=0.0
        )


def test_that_a_rank_left_is_told_where_all_that_wait_hear_of_it():
    groups = store_groups(4)
    leave(groups[0].job_store, 3)
    told = []

    def wait_for_three(group):
        group.wait_until(lambda: bool(told), place="the gate", awaited=lambda: [3], tell=told.append)

    assert at_once(*(functools.partial(wait_for_three, group) for group in groups[:3])) == [None] * 3
    assert {(record.rank, record.error_type) for record in told} == {(3, LEFT)}
