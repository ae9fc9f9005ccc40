import datetime

import pytest

from distman._store.connection import GaveUpError
from distman._store.torch_store import AbortableStore, TorchStore
from tests.store.stores import open_store

from ..store.stores import MemoryStore


@pytest.fixture(params=["memory", "unix"])
def plain(request):
    """A store in memory, or the part of one that is opened."""
    if request.param == "memory":
        yield MemoryStore()
        return
    with open_store("unix") as opened:
        whole = TorchStore(opened.client())
        yield whole.part("job")


def test_what_is_set_is_found(plain):
    store = AbortableStore(plain, "failure", 5)
    store.set("key", "value")
    store.wait(["key"])
    assert store.get("key") == b"value"
    assert store.add("number", 2) == 2
    assert store.check(["key", "number"])
    assert not store.check(["other"])


def test_a_failure_ends_the_wait(plain):
    plain.set("failure", "why")
    with pytest.raises(GaveUpError):
        AbortableStore(plain, "failure", 5).get("key")
    plain.set("key", "value")
    with pytest.raises(GaveUpError):
        AbortableStore(plain, "failure", 5).multi_get(["key", "other"])


def test_several_values_come_at_once(plain):
    store = AbortableStore(plain, "failure", 5)
    store.set("key", "value")
    store.set("other", "another")
    assert store.multi_get(["other", "key"]) == [b"another", b"value"]


@pytest.mark.parametrize(("own", "asked"), [(0.05, 3600), (3600, 0.05)])
def test_the_shorter_limit_ends_the_wait_for_a_rank_that_died(plain, own, asked):
    with pytest.raises(TimeoutError, match=r"keys \['key'\] must be set within 0.05 s"):
        AbortableStore(plain, "failure", own).wait(["key"], datetime.timedelta(seconds=asked))
