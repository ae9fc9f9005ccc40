"""After a failure nobody waits for what the failed rank never completes, as NCCL would on a GPU."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, JobFailed
from distman._coordination.failure.record import FailureRecord
from distman._coordination.tracking import Call
from distman._job.shutdown import end_groups
from distman._torch_internals import default_store, is_registered
from distman.collectives import all_gather_v
from distman.testing import ranks

pytestmark = pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend")


@ranks(2, manager=False)
def test_to_leave_after_a_failure_does_not_wait_for_the_others(rank):
    store = default_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        end_groups(None, torch.device("cpu"), aborts=True)
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
        store.wait(["begun"])
        try:
            raise ValueError("shard 1 is empty")
        except ValueError as error:
            manager._state.watcher._publish(FailureRecord.of(error, 1))
        store.wait(["saved"])
    else:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(JobFailed, match="shard 1 is empty"):
            _begin(store, lambda: manager.barrier("of all"))
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        store.set("saved", "yes")


@ranks(2)
def test_who_ends_a_group_alone_waits_for_the_others_for_some_seconds_only(monkeypatch, rank):
    """NCCL would wait for what is outstanding, and on one host for the others to leave, too."""
    said = []
    monkeypatch.setattr("distman._job.shutdown.logger.warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr("distman._base.timing.GROUPS_END", 0.2)
    DistributedManager.create_process_subgroup("pair", 2)
    manager = DistributedManager()
    group = manager.resolve_group("pair").process_group
    dist.barrier(group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        manager.destroy_group("pair")
        assert said[0].startswith("1 process groups have not ended for 0 s and are aborted")
        assert not is_registered(group)
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
    manager.barrier("rank 1 may end its group")
    if rank == 1:
        manager.destroy_group("pair")
        assert not said


@ranks(2)
def test_an_abort_that_waits_for_other_ranks_holds_nobody_up(monkeypatch):
    """NCCL may wait for those of the host, and who asks may be the watcher."""
    has_come = threading.Event()
    monkeypatch.setattr("distman._base.timing.ABORT_GROUPS", 0.1)
    monkeypatch.setattr("distman._coordination.tracking.abort_backends", lambda _: has_come.wait())
    Call(DistributedManager().resolve_group(), 0, "all_gather").interrupt()
    has_come.set()


@ranks(2, manager=False)
def test_who_leaves_alone_waits_for_the_others_for_some_seconds_only(monkeypatch, rank):
    monkeypatch.setattr("distman._base.timing.GROUPS_END", 0.2)
    store = default_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        end_groups(None, torch.device("cpu"), aborts=False)
        assert not dist.is_initialized()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        store.set("left", "yes")
    else:
        store.wait(["left"])


@ranks(2, manager=False)
def test_who_leaves_in_time_waits_for_what_is_outstanding():
    mine = torch.ones(2)
    dist.all_reduce(mine, async_op=True)
    end_groups(None, torch.device("cpu"), aborts=False)
    assert not dist.is_initialized()
    assert mine.tolist() == [2, 2]


@ranks(2, manager=False, dies=[1])
def test_a_rank_that_dies_in_a_collective_is_named(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize(timeout=60)
    all_gather_v(torch.ones(2), [2, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(JobFailed, match=r"rank 1 .*died"):
        all_gather_v(torch.ones(3), [3, 3])


@ranks(2, manager=False)
def test_an_error_within_a_collective_reaches_the_others_that_wait_in_it(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    manager = DistributedManager.initialize(timeout=60)
    store = default_store()
    if rank == 1:
        for module in ("_backend", "_meeting"):
            monkeypatch.setattr(f"distman.collectives._transport.{module}.batch_isend_irecv", _fail)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            all_gather_v(torch.ones(2))
        store.wait(["begun"])
        manager._state.watcher._publish(FailureRecord.of(caught.value, 1))
    else:
        with pytest.raises(JobFailed, match="OutOfMemoryError"):
            _begin(store, lambda: all_gather_v(torch.ones(2)))
    manager.cleanup()


def _begin(store, wait):
    """Let the other rank fail, and wait for it."""
    store.set("begun", "yes")
    wait()


def _fail(*_):
    raise torch.OutOfMemoryError("nothing left")
