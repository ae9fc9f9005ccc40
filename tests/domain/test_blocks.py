import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distman import DistributedManager
from distman.collectives import all_gather_objects
from distman.domain import DomainDataset, decompose, gather_domain, neighbours, scatter_domain, weighted_sizes
from distman.testing import ranks
from tests.collectives.reference import random_tensor

DIMS = {-2: "rows", -1: "columns"}


@pytest.mark.parametrize("weights", [None, {-1: [1, 3], -2: [0, 1]}], ids=["even", "weighted"])
@ranks(4)
def test_blocks_come_back(rank, weights):
    DistributedManager().initialize_mesh((2, 2), ("rows", "columns"))
    full = random_tensor(2, 5, 8).requires_grad_()
    block = scatter_domain(full if rank == 0 else None, DIMS, weights=weights)
    heights, widths = ([3, 2], [4, 4]) if weights is None else ([0, 5], [2, 6])
    row, column = divmod(rank, 2)
    assert torch.equal(block, full.split(heights, -2)[row].split(widths, -1)[column])
    assert torch.equal(gather_domain(block, DIMS, everywhere=True), full)
    back = gather_domain(block, DIMS)
    assert torch.equal(back, full) if rank == 0 else not back.numel()
    scale = random_tensor(2, 5, 8, seed=1)
    (back * (scale if rank == 0 else 1)).sum().backward()
    if rank == 0:
        assert torch.equal(full.grad, scale)


@ranks(4)
def test_misuse_is_an_error_on_all_ranks(rank):
    DistributedManager().initialize_mesh((2, 2), ("rows", "columns"))
    with pytest.raises(ValueError, match="tensor must be a field on the first rank, got NoneType"):
        scatter_domain(None, DIMS)
    with pytest.raises(ValueError, match=r"dims must be dims of the field, of 1 dims, got \[-2, -1\]"):
        scatter_domain(torch.ones(3), DIMS)
    with pytest.raises(ValueError, match="weights must hold one number for each of the 2 ranks of dim -1"):
        scatter_domain(torch.ones(3, 3), DIMS, weights={-1: [1]})
    with pytest.raises(ValueError, match="weights must hold one number for each of the 2 ranks of dim -2"):
        scatter_domain(torch.ones(3, 3), DIMS, weights={-2: [1, 2, 3]})
    with pytest.raises(ValueError, match=r"weights must be for the split dims \[-2, -1\], got some for dim 1"):
        scatter_domain(torch.ones(3, 3), DIMS, weights={1: [1, 2]})
    for call in (
        lambda: scatter_domain(torch.ones(3), -1),
        lambda: gather_domain(torch.ones(3), "rows"),
        lambda: decompose(torch.nn.ReLU(), [-1]),
        lambda: DomainDataset([torch.ones(3, 3)], None),
    ):
        with pytest.raises(TypeError, match="dims must map each split dim, counted from the end, to its group"):
            call()
    assert all_gather_objects(rank) == [0, 1, 2, 3]


def test_sizes_by_weights():
    assert weighted_sizes(10, [1, 1, 2]) == [2, 3, 5]
    assert weighted_sizes(0, [1, 1]) == [0, 0]
    assert sum(weighted_sizes(17, [0.3, 0.1, 0.9])) == 17
    for weights in ([], [0, 0], [1, -1]):
        with pytest.raises(ValueError, match="weights must be 0 or more"):
            weighted_sizes(3, weights)


@ranks(4)
def test_neighbours_along_the_axes_of_a_mesh(rank):
    DistributedManager().initialize_mesh((1, 2, 2), ("x", "y", "z"))
    row, column = divmod(rank, 2)
    assert neighbours("x") == (None, None)
    assert neighbours("x", periodic=True) == (rank, rank)
    assert neighbours("y") == ((None, rank + 2) if row == 0 else (rank - 2, None))
    assert neighbours("z") == ((None, rank + 1) if column == 0 else (rank - 1, None))
    assert neighbours("z", periodic=True) == (rank ^ 1, rank ^ 1)
    assert neighbours() == (rank - 1 if rank else None, rank + 1 if rank < 3 else None)
    assert neighbours(periodic=True) == ((rank - 1) % 4, (rank + 1) % 4)


@ranks(4)
def test_blocks_of_dtensors_where_shards_are_even(rank):
    mesh = DistributedManager().initialize_mesh((2, 2), ("rows", "columns"))
    full = random_tensor(3, 4, 6)
    sharded = distribute_tensor(full, mesh, [Shard(1), Shard(2)])
    block = sharded.to_local()
    assert torch.equal(block, scatter_domain(full if rank == 0 else None, DIMS))
    back = DTensor.from_local(block, mesh, [Shard(1), Shard(2)])
    assert back.shape == full.shape
    assert torch.equal(back.full_tensor(), full)
