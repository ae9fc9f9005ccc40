"""``use_distributed`` and ``backend`` where a process group is there already."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, UndefinedGroupError, initialize_ddp
from distman.collectives import all_gather_objects, all_gather_v, broadcast_if_ddp, fused_all_reduce
from distman.metrics import aggregate_loss, reduce_loss
from distman.testing import ranks

from .test_without_manager import NEEDS_MANAGER, WORKS_ALONE, files  # noqa: F401 - a fixture


@ranks(2, 3, manager=False)
def test_one_process_beside_a_group_is_alone(rank, world_size):
    manager = DistributedManager.initialize(use_distributed=False, device="cpu")
    assert (manager.rank, manager.world_size, manager.distributed, manager.backend) == (0, 1, False, None)
    assert manager.group() is None
    assert manager.initialize_mesh((1, -1), ("data", "model")).size() == 1
    module = torch.nn.Linear(1, 1)
    assert manager.wrap_ddp(module) is module
    assert broadcast_if_ddp(rank) == rank
    assert aggregate_loss(rank) == reduce_loss(rank) == rank
    own = torch.full((2,), float(rank))
    assert torch.equal(fused_all_reduce(own), own)
    assert torch.equal(all_gather_v(own), own)
    assert all_gather_objects(rank) == [rank]
    DistributedManager.cleanup()
    assert dist.is_initialized()
    answers = torch.ones(1)
    dist.all_reduce(answers)
    assert answers.item() == world_size


@ranks(2, manager=False)
def test_one_process_beside_a_group_waits_for_nobody(rank, files):  # noqa: F811 - the fixture
    DistributedManager.initialize(use_distributed=False, device="cpu")
    if rank == 0:
        for call in (NEEDS_MANAGER | WORKS_ALONE).values():
            with contextlib.suppress(ValueError, UndefinedGroupError):  # arguments for two ranks
                call(files)


@pytest.mark.parametrize("use_distributed", [None, True])
@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
@ranks(2, manager=False)
def test_a_group_is_adopted_unless_it_is_ruled_out(rank, use_distributed, backend):
    manager = DistributedManager.initialize(use_distributed=use_distributed, backend=backend)
    assert (manager.rank, manager.world_size) == (rank, 2)


@ranks(1, 2, manager=False)
def test_another_backend_than_that_of_the_group_is_an_error(monkeypatch):
    monkeypatch.setattr("distman.manager.check_backend", lambda _: None)  # this torch knows gloo alone
    for backend in ("nccl", "cpu:gloo,cuda:nccl", "cuda:nccl"):
        with pytest.raises(ValueError, match=r"backend must be that of the process group that is adopted, '.*gloo"):
            DistributedManager.initialize(backend=backend)
    assert initialize_ddp() is not None
