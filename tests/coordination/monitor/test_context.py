"""What is said of the rank that serves the store, and how often ranks look."""

import pytest
from torch.distributed import HashStore

from distman._coordination.monitor.context import WatchContext, WatchLimits, interval, late_after

from ..ranks import Place


def context(store_rank, rank=1, opener=None, hosts=("n1", "n1")):
    peers = [Place(rank, host) for rank, host in enumerate(hosts)]
    is_one_host = len({*hosts}) == 1
    return WatchContext(HashStore(), "tcp://n1:5", store_rank, rank, peers, is_one_host=is_one_host, opener=opener)


@pytest.mark.parametrize(
    ("store_rank", "who", "text"),
    [
        (0, 0, "rank 0 (n1, pid 100), which serves the job's store at tcp://n1:5, has been silent for 9 s"),
        (None, 1, "rank 1 (n1, pid 101) got no answer from the job's store at tcp://n1:5 for 9 s"),
    ],
)
def test_a_silent_store(store_rank, who, text):
    record = context(store_rank).store_rank_is_silent(9)
    assert record.rank == who
    assert text in str(record.to_error())


@pytest.mark.parametrize(
    ("hosts", "who", "text"),
    [
        (("n1", "n1"), 1, "rank 1 (n1, pid 101) got no answer from the job's store at tcp://n1:5 for 9 s"),
        (("n1", "n2"), 0, "rank 0 (n1, pid 100) is beside the job's store at tcp://n1:5, which has not answered"),
    ],
)
def test_a_silent_store_of_its_own(hosts, who, text):
    """From another host it cannot be told from one that is cut off: so the rank there is named."""
    record = context(None, opener=0, hosts=hosts).store_rank_is_silent(9)
    assert record.rank == who
    assert text in str(record.to_error())


@pytest.mark.parametrize(
    ("store_rank", "who", "text"),
    [
        (0, 0, "rank 0 (n1, pid 100), which served the job's store at tcp://n1:5, died"),
        (1, 1, "rank 1 (n1, pid 101) lost the job's store"),
        (None, 1, "rank 1 (n1, pid 101) lost the job's store"),
    ],
)
def test_a_store_that_is_gone(store_rank, who, text):
    record = context(store_rank).store_rank_is_gone()
    assert record.rank == who
    assert text in str(record.to_error())


@pytest.mark.parametrize(("store_rank", "who"), [(0, 0), (None, 1)])
def test_a_store_whose_rank_left(store_rank, who):
    record = context(store_rank).store_rank_has_left("barrier 'a'")
    assert record.rank == who
    assert "nobody can tell whose end broke barrier 'a'" in record.error_text


@pytest.mark.parametrize(("silence", "unreachable"), [(2, 1.5), (20, 5), (300, 45), (1800, 270)])
def test_a_host_may_be_unreachable_for_less_than_a_rank_may_be_silent(silence, unreachable):
    assert WatchLimits(silence=silence).unreachable == unreachable


def test_many_ranks_look_less_often():
    assert [interval(ranks) for ranks in (2, 500, 5_000, 100_000)] == [0.2, 0.2, 2.0, 40.0]
    assert late_after(2) == 1.4


def test_a_rank_knows_itself():
    assert context(0).me.rank == 1
    assert not context(0).is_store_rank
    assert context(1).is_store_rank
