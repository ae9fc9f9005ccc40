"""DISTMAN_DEBUG=1: ranks that call differently all raise, and say how."""

import re

import pytest
import torch

from distman import BarrierTimeoutError, DistributedManager, PlanMismatchError
from distman.collectives import all_gather_objects, all_gather_v, broadcast_data, fused_all_reduce, reduce_scatter_v
from distman.mappings import reduce_from_parallel_region
from distman.testing import ranks


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")


def both_operations(rank):
    return all_gather_v(torch.ones(2)) if rank else reduce_scatter_v(torch.ones(2), [1, 1])


def other_dtype(rank):
    return all_gather_v(torch.ones(2, dtype=[torch.float32, torch.float64][rank]), [2, 2])


def other_shape(rank):
    return all_gather_v(torch.ones(2, 3 + rank), [2, 2])


def other_sizes(rank):
    return all_gather_v(torch.ones(2), [[2, 1], [1, 2]][rank])


def other_dim(rank):
    return all_gather_v(torch.ones(2, 2), [2, 2], dim=rank)


def other_region(rank):
    return reduce_from_parallel_region(torch.ones(2 + rank))


def other_source(rank):
    return broadcast_data(1, rank)


def tensor_or_object(rank):
    return fused_all_reduce(torch.ones(1)) if rank else all_gather_objects(1)


CALLS = [
    both_operations,
    other_dtype,
    other_shape,
    other_sizes,
    other_dim,
    other_region,
    other_source,
    tensor_or_object,
]


@pytest.mark.parametrize("call", CALLS)
@ranks(2)
def test_a_table_names_what_each_rank_does_and_where(monkeypatch, rank, call):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    with pytest.raises(
        PlanMismatchError, match="all ranks must make the same call at collective 0 of group world"
    ) as e:
        call(rank)
    rows = str(e.value).splitlines()[1:]
    assert [re.match(r"  rank (\d) \(", row).group(1) for row in rows] == ["0", "1"]
    assert all(re.search(r"test_debug\.py:\d+$", row) for row in rows)
    assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@ranks(3)
def test_equal_calls_pass_and_leave_nothing_in_the_store(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    manager = DistributedManager()
    manager.barrier("before")
    store = manager._state.job.rendezvous.store
    all_gather_v(torch.ones(1))
    manager.barrier("one")
    before = store.num_keys()
    manager.barrier("counted")
    for _ in range(20):
        shard = torch.ones(rank + 1, requires_grad=True)
        all_gather_v(shard).sum().backward()
        assert shard.grad.unique() == 3
    manager.barrier("after")
    barrier_keys = 2 * (3 + 3)  # of the barrier before, which others may not have left, and of the one behind
    assert store.num_keys() <= before + barrier_keys
    manager.barrier("end")


@ranks(2, manager=False)
def test_a_rank_that_does_not_come_is_named(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    manager = DistributedManager.initialize(timeout=1)
    if rank == 0:
        with pytest.raises(
            BarrierTimeoutError,
            match=r"collective 0 of group world failed: within 1 s, 1 of . ranks did not come: rank 1",
        ):
            all_gather_v(torch.ones(1))
    manager.barrier("end", timeout=30)


@ranks(2)
def test_without_it_nothing_is_compared(rank):
    full = fused_all_reduce(torch.ones(2 - rank)[:1])
    assert full == 2


@ranks(2)
def test_calls_that_mean_the_same_pass(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    shard = torch.ones(2, 2, requires_grad=rank == 0)
    assert all_gather_v(shard, dim=[0, -2][rank]).shape == (4, 2)
    assert all_gather_v(torch.ones(2), [(2, 2), [2, 2]][rank]).shape == (4,)


@ranks(2)
def test_arguments_that_are_wrong_on_one_rank_are_shown_on_both(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    with pytest.raises(PlanMismatchError, match="src 5"):
        broadcast_data(1, [0, 5][rank])
    with pytest.raises(PlanMismatchError, match="use_fp32 False"):
        all_gather_v(torch.ones(2), use_fp32=rank == 0)
