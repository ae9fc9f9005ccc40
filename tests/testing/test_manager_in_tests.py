import os

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, NotInitializedError
from distman.testing import ranks


@ranks(1, 2, 3)
def test_the_manager_is_initialized_on_the_group(rank, world_size):
    manager = DistributedManager()
    assert (manager.rank, manager.local_rank) == (rank, rank)
    assert (manager.world_size, manager.local_world_size) == (world_size, world_size)
    assert manager.distributed
    assert manager.device == torch.device("cpu")
    assert manager.initialization_method == "env"
    assert [peer.rank for peer in manager.roll_call] == list(range(world_size))
    assert manager.roll_call[rank].pid == os.getpid()
    manager.barrier("all here")


@ranks(2, manager=False)
def test_the_manager_can_be_left_alone(rank):
    with pytest.raises(NotInitializedError):
        DistributedManager().rank  # noqa: B018
    DistributedManager.initialize()
    assert DistributedManager().rank == rank == dist.get_rank()


@ranks(2, manager=False)
def test_it_was_cleaned_up():
    assert not DistributedManager.is_initialized()


@ranks(2)
def test_a_test_may_clean_up_itself():
    DistributedManager.cleanup()
    assert dist.is_initialized()
    dist.destroy_process_group()


@ranks(2)
def test_and_it_is_there_again(rank):
    assert DistributedManager().rank == rank


@ranks(3, dies=[2])
def test_the_manager_notices_a_death(rank):
    if rank == 2:
        os._exit(1)
    with pytest.raises(RuntimeError):
        dist.barrier()
