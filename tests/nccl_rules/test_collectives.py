"""How the collectives keep NCCL's rules."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, PlanMismatchError
from distman.collectives import all_gather_v, fused_all_reduce, indexed_all_to_all_v, reduce_scatter_v
from distman.collectives._exchange import exchange
from distman.collectives._transport import carrier_of
from distman.testing import ranks

OVER_NCCL_RULES = pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend")


@OVER_NCCL_RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1])
@ranks(2)
def test_shards_of_one_size_travel_by_one_operation_of_the_backend(monkeypatch, rank, dtype, dim):
    monkeypatch.delattr("distman.collectives._transport._backend.batch_isend_irecv")
    whole = torch.arange(12).reshape(2, 6)
    full = torch.cat([whole, whole + 12], dim).to(dtype)
    shard = full.chunk(2, dim)[rank]
    if dtype.is_complex:
        full, shard = full.conj().resolve_conj(), shard.conj()
    assert torch.equal(all_gather_v(shard, [shard.shape[dim]] * 2, dim), full)


@OVER_NCCL_RULES
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.bfloat16], ids=str)
@ranks(2)
def test_sums_of_slices_of_one_size_are_one_operation_of_the_backend(monkeypatch, rank, dtype):
    monkeypatch.delattr("distman.collectives._transport._backend.batch_isend_irecv")
    for dim in (0, 1):
        full = torch.arange(8).reshape(2, 4).to(dtype) + rank
        part = reduce_scatter_v(full, [full.shape[dim] // 2] * 2, dim, use_fp32=False)
        assert torch.equal(part, (2 * full + 1 - 2 * rank).chunk(2, dim)[rank])
    if dtype.is_floating_point or dtype.is_complex:
        shard = torch.ones(3, dtype=dtype, requires_grad=True)
        (all_gather_v(shard, [3, 3], use_fp32=False) * (rank + 1)).sum().abs().backward()
        assert shard.grad.tolist() == [3] * 3


@OVER_NCCL_RULES
@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float16], ids=str)
@ranks(2)
def test_what_no_backend_adds_up_as_wished_is_sent(rank, dtype):
    terms = torch.tensor([0, rank, 1, 1]).to(dtype)
    expected = torch.tensor([[0, 1], [2, 2]][rank]).to(dtype)
    assert torch.equal(reduce_scatter_v(terms, [2, 2]), expected)


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
    assert carrier_of(gpu, dist.group.WORLD) == cpu
    assert carrier_of(cpu, dist.group.WORLD) == cpu
    assert carrier_of(gpu, None) == gpu


@ranks(2)
def test_the_host_does_not_wait_for_a_gpu(monkeypatch, rank):
    """Meta tensors stand for those of a GPU: to read one is an error."""
    there, sent = torch.device("meta"), []
    all_reduce = dist.all_reduce
    group = dataclasses.replace(DistributedManager().resolve_group(), device_types=("cpu", "meta"))

    def record(tensor, *arguments, **options):
        if not tensor.is_meta:
            return all_reduce(tensor, *arguments, **options)
        sent.append(tensor.numel())
        return Future()

    class Future:
        def wait(self):
            pass

    def send(operations):
        return [] if operations[0].tensor.is_meta else dist.batch_isend_irecv(operations)

    monkeypatch.setattr(dist, "all_reduce", record)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # it does not know the device
    for module in ("_border", "_all_to_all"):
        monkeypatch.setattr(f"distman.collectives.{module}.with_memory", lambda tensor, *_: tensor)
    for looks in ("are_simple", "is_plain"):
        monkeypatch.setattr(f"distman.collectives._fused.{looks}", lambda _: True)
    for module in ("_all_gather", "_transport", "_transport._backend"):
        monkeypatch.setattr(f"distman.collectives.{module}.collects_batches", lambda _, device: device == there)
    monkeypatch.setattr("distman.collectives._transport._backend.batch_isend_irecv", send)
    for module in ("_fused", "_all_to_all"):
        monkeypatch.setattr(f"distman.collectives.{module}.resolve_group", lambda _: group)

    for length in (3, 5000):
        for async_op in (False, True):
            mine = torch.empty(length, device=there)
            _, work = fused_all_reduce(mine, async_op=True) if async_op else (fused_all_reduce(mine), None)
            assert work is None or work.wait()
    assert sent == [3, 3, 5000, 5000]
    with pytest.raises(PlanMismatchError, match=r"rank 1: sum in torch.float32 on meta"):
        fused_all_reduce(torch.empty(1 + rank, device=there))
    with pytest.raises(PlanMismatchError, match=r"rank 0: sum in torch.float32 of"):
        fused_all_reduce(torch.ones(1, device=there if rank else "cpu"))
    rows, indices = torch.empty(4, 2, device=there), torch.zeros(1, dtype=torch.long, device=there)
    assert indexed_all_to_all_v(rows, [indices, indices], [[1, 1], [1, 1]]).shape == (2, 2)
