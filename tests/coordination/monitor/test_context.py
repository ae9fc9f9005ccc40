"""What is said of the store and the rank beside it, and how often ranks look."""

import pytest

from distman._coordination.monitor.context import WatchContext, WatchLimits, interval, late_after

from ...store.stores import MemoryStore
from ..ranks import Place


def context(rank=1, opener=0, hosts=("n1", "n1")):
    peers = [Place(rank, host) for rank, host in enumerate(hosts)]
    return WatchContext(MemoryStore(), "tcp://n1:5", rank, peers, opener=opener)


@pytest.mark.parametrize(
    ("opener", "hosts", "who", "text"),
    [
        (0, ("n1", "n1"), 1, "rank 1 (n1, pid 101) got no answer from the job's store at tcp://n1:5 for 9 s"),
        (0, ("n1", "n2"), 0, "rank 0 (n1, pid 100) is beside the job's store at tcp://n1:5, which has not answered"),
    ],
)
def test_a_silent_store(opener, hosts, who, text):
    """From another host it cannot be told from one that is cut off: so the rank there is named."""
    record = context(opener=opener, hosts=hosts).store_is_silent(9)
    assert record.rank == who
    assert text in str(record.to_error())


@pytest.mark.parametrize(("opener", "who"), [(0, 0), (1, 1)])
def test_a_store_that_is_gone(opener, who):
    record = context(opener=opener).store_is_gone()
    assert record.rank == who
    assert f"rank {who} (n1, pid {100 + who}) lost the job's store" in str(record.to_error())


def test_a_store_whose_rank_left():
    record = context().store_has_left("barrier 'a'")
    assert record.rank == 0
    assert "nobody can tell whose end broke barrier 'a'" in record.error_text


@pytest.mark.parametrize(("silence", "unreachable"), [(2, 1.5), (20, 5), (300, 45), (1800, 270)])
def test_a_host_may_be_unreachable_for_less_than_a_rank_may_be_silent(silence, unreachable):
    assert WatchLimits(silence=silence).unreachable == unreachable


def test_many_ranks_look_less_often():
    assert [interval(ranks) for ranks in (2, 500, 5_000, 100_000)] == [0.2, 0.2, 2.0, 40.0]
    assert late_after(2) == 1.4


def test_a_rank_knows_itself():
    assert context().me.rank == 1
