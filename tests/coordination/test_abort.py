"""After a failure nobody waits for what the failed rank never completes, as NCCL would on a GPU."""

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, RankFailedError
from distman._coordination.failure.record import FailureRecord
from distman._job.start import _leave_group
from distman._torch_internals import default_store
from distman.testing import ranks

pytestmark = pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend")


@ranks(2, manager=False)
def test_to_leave_after_a_failure_does_not_wait_for_the_others(rank):
    store = default_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        _leave_group()
        assert not dist.is_initialized()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        store.set("left", "yes")
    else:
        store.wait(["left"])


@ranks(2)
def test_groups_are_aborted_when_they_are_closed_after_a_failure(rank):
    DistributedManager.create_process_subgroup("pair", 2)
    group = DistributedManager().resolve_group("pair")
    store = default_store()
    dist.barrier(group.process_group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group.process_group, async_op=True)
        DistributedManager()._state.groups.close(aborts=True)
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        store.set("closed", "yes")
    else:
        store.wait(["closed"])


@ranks(2, manager=False)
def test_what_a_failure_ends_is_not_in_the_way_of_what_its_handler_saves(monkeypatch, rank):
    """The handler copies from the device, behind the operation that waits for the rank that failed."""
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    manager = DistributedManager.initialize(timeout=60)
    store = default_store()
    if rank == 1:
        try:
            raise ValueError("shard 1 is empty")
        except ValueError as error:
            manager._state.watcher._publish(FailureRecord.of(error, 1))
        store.wait(["saved"])
    else:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(RankFailedError, match="shard 1 is empty"):
            manager.barrier("of all")
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        store.set("saved", "yes")
