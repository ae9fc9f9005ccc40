"""Keys that are deleted after use, and never before."""

import random

import pytest
from torch.distributed import HashStore

from distman._coordination import protocol
from distman._coordination.sync import KeySequence


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
