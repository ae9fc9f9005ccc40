import pytest
import torch

from distman.collectives import distributed_transpose, gather_v
from distman.testing import ranks
from tests.collectives.reference import (
    LAYOUTS,
    check_against_one_process,
    check_gradients_numerically,
    in_one_job,
    losses,
    random_tensor,
    sizes_of,
    strided,
)


def make_inputs(layout, dim, world_size, dtype=torch.float64):
    shapes = [[2, 3] for _ in range(world_size)]
    for shape, size in zip(shapes, sizes_of(layout, world_size), strict=True):
        shape[dim] = size
    return [random_tensor(*shape, dtype=dtype, seed=rank) for rank, shape in enumerate(shapes)]


def reference(dim, dst):
    def gather(shards):
        full = torch.cat(shards, dim)
        return [full if rank == dst else full.narrow(dim, 0, 0) for rank in range(len(shards))]

    return gather


@ranks(1, 2, 3)
@in_one_job(layout=LAYOUTS)
def test_equals_one_process(rank, world_size, layout):
    dst = world_size - 1
    for weights, dim in zip(losses(world_size), [0, 1, -2], strict=True):
        for sizes in (None, sizes_of(layout, world_size)):
            check_against_one_process(
                lambda shard, sizes=sizes, dim=dim: gather_v(shard, sizes, dim, dst),
                reference(dim, dst),
                make_inputs(layout, dim, world_size),
                rank,
                weights,
            )


@ranks(3)
@in_one_job(dtype=[torch.float32, torch.bfloat16, torch.complex64])
def test_every_dtype(rank, world_size, dtype):
    inputs = [strided(one) for one in make_inputs("empty", 1, world_size, dtype)]
    check_against_one_process(
        lambda shard: gather_v(shard, dim=1), reference(1, 0), inputs, rank, losses(world_size)[0]
    )


@ranks(2)
@in_one_job(dtype=[torch.int64, torch.bool])
def test_integers(rank, dtype):
    inputs = make_inputs("empty", 0, 2, dtype)
    full = gather_v(inputs[rank])
    assert torch.equal(full, torch.cat(inputs) if rank == 0 else inputs[0][:0])


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@ranks(3)
@in_one_job(layout=LAYOUTS)
def test_gradcheck(rank, world_size, layout):
    inputs = make_inputs(layout, 0, world_size)
    check_gradients_numerically(lambda shard: gather_v(shard, sizes_of(layout, world_size), dst=1), inputs, rank)


@ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dst": 2}, "dst must be a rank in group 'world', 0 to 1, got 2"),
        ({"sizes": [1]}, "each of the 2 ranks"),
        ({"dim": 1}, "dim must be between -1 and 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        gather_v(torch.ones(2), **arguments)


@ranks(2)
def test_wrong_arguments_of_one_rank_are_refused_before_it_sends_anything(rank):
    mine = torch.full((2, 2), float(rank))
    if rank == 0:
        with pytest.raises(ValueError, match=r"^dst must be a rank"):
            gather_v(mine, dst=7)
        with pytest.raises(ValueError, match=r"^dim0 must be between"):
            distributed_transpose(mine, 5, 1)
        with pytest.raises(ValueError, match=r"two different dims"):
            distributed_transpose(mine, 1, 1)
    whole = gather_v(mine, dst=1)
    assert whole.tolist() == ([[0, 0], [0, 0], [1, 1], [1, 1]] if rank == 1 else [])
    assert distributed_transpose(mine, 0, 1).tolist() == [[0, 0, 1, 1]]
