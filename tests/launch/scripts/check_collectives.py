"""Compare every collective, and Fourier transforms, on this rank's device, with the same computation on one process.

Modules that are named on the command line are imported first.
"""

import importlib
import sys

import torch

from distman import DistributedManager, fft, split_sizes
from distman.collectives import (
    all_gather_objects,
    all_gather_v,
    all_to_all_v,
    broadcast_data,
    distributed_transpose,
    fused_all_reduce,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.mappings import reduce_from_parallel_region
from distman.metrics import reduce_loss

SHARDS = (3, 1, 0, 2)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)


def random_tensor(*shape, dtype, seed):
    values = torch.randint(-9, 9, (*shape, 2), generator=torch.Generator().manual_seed(seed)).float()
    values = torch.view_as_complex(values) if dtype.is_complex else values[..., 0]
    return values.to(manager.device, dtype)


def check(name, operation, reference, inputs):
    mine = inputs[rank].clone().requires_grad_()
    result = operation(mine)
    leaves = [one.clone().requires_grad_() for one in inputs]
    expected = reference(leaves)
    torch.testing.assert_close(result, expected[rank], msg=f"{name} of {mine.dtype}")
    (result * (rank + 1)).sum().abs().backward()
    sum((one * (index + 1)).sum().abs() for index, one in enumerate(expected)).backward()
    expected_grad = torch.zeros_like(mine) if leaves[rank].grad is None else leaves[rank].grad
    torch.testing.assert_close(mine.grad, expected_grad, msg=f"gradient of {name} of {mine.dtype}")


def transposed(shards):
    full = torch.cat(shards, 1)
    return list(full.split(split_sizes(full.shape[0], size), 0))


def spectra_of(transform):
    def spectra(shards):
        full = transform(torch.cat(shards, 1))
        return list(full.split(split_sizes(full.shape[0], size), 0))

    return spectra


def indexed(shards):
    return [torch.cat([one.flip(1)[:, :1] for one in shards], 1)] * size


for name in sys.argv[1:]:
    importlib.import_module(name)
manager = DistributedManager.initialize()
rank, size = manager.rank, manager.world_size
sizes = list(SHARDS[:size])
last = torch.tensor([2], device=manager.device)
for dtype in DTYPES:
    shards = [random_tensor(4, length, dtype=dtype, seed=one) for one, length in enumerate(sizes)]
    fulls = [random_tensor(4, sum(sizes), dtype=dtype, seed=one) for one in range(size)]
    evens = [random_tensor(2, 3, dtype=dtype, seed=one) for one in range(size)]
    squares = [random_tensor(2, size, dtype=dtype, seed=one) for one in range(size)]
    check("all_gather_v", lambda t: all_gather_v(t, dim=1), lambda ts: [torch.cat(ts, 1)] * size, shards)
    check(
        "gather_v",
        lambda t: gather_v(t, dim=1),
        lambda ts: [torch.cat(ts, 1), *[torch.cat(ts, 1)[:, :0]] * (size - 1)],
        shards,
    )
    check("scatter_v", lambda t: scatter_v(t, sizes, 1), lambda ts: [*ts[0].split(sizes, 1)], fulls[:1] * size)
    check("reduce_scatter_v", lambda t: reduce_scatter_v(t, sizes, 1), lambda ts: [*sum(ts).split(sizes, 1)], fulls)
    check("distributed_transpose", lambda t: distributed_transpose(t, 0, 1), transposed, shards)
    check(
        "all_to_all_v",
        lambda t: all_to_all_v(t, [[1] * size] * size, 1),
        lambda ts: [torch.stack([t[:, r] for t in ts], 1) for r in range(size)],
        squares,
    )
    check(
        "indexed_all_to_all_v",
        lambda t: indexed_all_to_all_v(t, [last] * size, [[1] * size] * size, dim=1),
        indexed,
        evens,
    )
    check("fused_all_reduce", lambda t: fused_all_reduce([t])[0], lambda ts: [sum(ts)] * size, evens)
    torch.testing.assert_close(reduce_from_parallel_region(evens[rank]), sum(evens))
    if dtype != torch.bfloat16:
        check("fft2", lambda t: fft.fft2(t, shard_dim=1), spectra_of(torch.fft.fft2), shards)
    if dtype in (torch.float64, torch.float32):
        check("rfft2", lambda t: fft.rfft2(t, shard_dim=1), spectra_of(torch.fft.rfft2), shards)
data = broadcast_data({"large": torch.arange(20_000, device=manager.device), "small": last} if rank == 0 else None)
assert data["large"].device == data["small"].device == manager.device
assert data["large"].sum() == 20_000 * 19_999 // 2
assert all_gather_objects(rank) == list(range(size))
assert reduce_loss(2.0) == (2.0 if rank == 0 else None)
sys.stdout.write(f"rank {rank} of {size} on {manager.device}: as on one process\n")
