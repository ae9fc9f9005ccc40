"""How the collectives keep NCCL's rules."""

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager
from distman.collectives import all_gather_v
from distman.collectives._exchange import _carrier, exchange
from distman.testing import ranks

OVER_NCCL_RULES = pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend")


@OVER_NCCL_RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1])
@ranks(2)
def test_shards_of_one_size_travel_by_one_operation_of_the_backend(monkeypatch, rank, dtype, dim):
    monkeypatch.delattr("distman.collectives._exchange.batch_isend_irecv")
    whole = torch.arange(12).reshape(2, 6)
    full = torch.cat([whole, whole + 12], dim).to(dtype)
    shard = full.chunk(2, dim)[rank]
    if dtype.is_complex:
        full, shard = full.conj().resolve_conj(), shard.conj()
    assert torch.equal(all_gather_v(shard, [shard.shape[dim]] * 2, dim), full)


@OVER_NCCL_RULES
@ranks(2)
def test_a_lack_of_memory_within_a_batch_closes_its_group_alone(rank):
    """A part of the batch may be under way, which a later one would meet."""
    DistributedManager.create_process_subgroup("pair", 2)
    group = DistributedManager().resolve_group("pair")
    all_gather_v(torch.ones(1 + rank), group="pair")
    if rank == 0:
        mine, target = torch.ones(2), torch.empty(2)
        target.copy_ = _run_out_of_memory
        with pytest.raises(torch.OutOfMemoryError):
            exchange([mine, mine], [target, torch.empty(2)], group)
    with pytest.raises(RuntimeError):
        all_gather_v(torch.ones(3), [3, 3], group="pair")
    assert all_gather_v(torch.ones(1 + rank)).tolist() == [1] * 3


def _run_out_of_memory(*_):
    raise torch.OutOfMemoryError


@ranks(2)
def test_tensors_of_a_gpu_travel_over_gloo_by_way_of_the_cpu():
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert _carrier(gpu, dist.group.WORLD) == cpu
    assert _carrier(cpu, dist.group.WORLD) == cpu
    assert _carrier(gpu, None) == gpu
