import datetime

import pytest
from torch.distributed import HashStore

from distman._coordination.abortable_store import AbortableStore, GaveUpError


def test_what_is_set_is_found():
    store = AbortableStore(HashStore(), "failure", 5)
    store.set("key", "value")
    store.wait(["key"])
    assert store.get("key") == b"value"
    assert store.add("number", 2) == 2
    assert store.check(["key", "number"])
    assert not store.check(["other"])


def test_a_failure_ends_the_wait():
    plain = HashStore()
    plain.set("failure", "why")
    with pytest.raises(GaveUpError):
        AbortableStore(plain, "failure", 5).get("key")


@pytest.mark.parametrize(("own", "asked"), [(0.05, 3600), (3600, 0.05)])
def test_the_shorter_limit_ends_the_wait_for_a_rank_that_died(own, asked):
    with pytest.raises(TimeoutError, match=r"keys \['key'\] must be set within 0.05 s"):
        AbortableStore(HashStore(), "failure", own).wait(["key"], datetime.timedelta(seconds=asked))
