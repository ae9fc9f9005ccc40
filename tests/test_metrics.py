import pytest
import torch

from distman import DistributedManager
from distman.metrics import reduce_loss
from distman.testing import ranks


@ranks(1, 2, 3)
def test_mean_and_sum_in_double_precision(rank, world_size):
    losses = [0.1 * (one + 1) for one in range(world_size)]
    dst = world_size - 1
    mean, total = (
        reduce_loss(losses[rank], dst),
        reduce_loss(torch.tensor(losses[rank], dtype=torch.float64), dst, mean=False),
    )
    if rank == dst:
        assert mean == pytest.approx(sum(losses) / world_size, rel=1e-15)
        assert total == pytest.approx(sum(losses), rel=1e-15)
    else:
        assert (mean, total) == (None, None)


@ranks(2)
def test_a_rank_that_is_none():
    with pytest.raises(ValueError, match="dst_rank must be a rank in group 'world', 0 to 1, got 2"):
        reduce_loss(1.0, 2)


@ranks(4)
def test_over_a_group(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    assert reduce_loss(rank, 1, group="pairs") == (rank - 0.5 if rank % 2 else None)
