import pytest
import torch

from distman.collectives import reduce_scatter_v
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
    shape = [2, 3]
    shape[dim] = sum(sizes_of(layout, world_size))
    return [random_tensor(*shape, dtype=dtype, seed=rank) for rank in range(world_size)]


@ranks(1, 2, 3)
@in_one_job(layout=LAYOUTS)
def test_equals_one_process(rank, world_size, layout):
    sizes = sizes_of(layout, world_size)
    for weights, dim in zip(losses(world_size), [0, 1, -1], strict=True):
        check_against_one_process(
            lambda full, dim=dim: reduce_scatter_v(full, sizes, dim),
            lambda fulls, dim=dim: list(sum(fulls).split(sizes, dim)),
            make_inputs(layout, dim, world_size),
            rank,
            weights,
        )


@ranks(3)
@in_one_job(dtype=[torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_every_dtype(rank, world_size, dtype):
    sizes = sizes_of("empty", world_size)
    check_against_one_process(
        lambda full: reduce_scatter_v(full, sizes, 1),
        lambda fulls: list(sum(fulls).split(sizes, 1)),
        [strided(one) for one in make_inputs("empty", 1, world_size, dtype)],
        rank,
        losses(world_size)[0],
    )


@ranks(2)
@in_one_job(dtype=[torch.int64, torch.uint8, torch.bool])
def test_integers_are_added_and_truths_are_joined(rank, dtype):
    inputs = make_inputs("uneven", 0, 2, dtype)
    total = inputs[0] | inputs[1] if dtype == torch.bool else inputs[0] + inputs[1]
    assert torch.equal(reduce_scatter_v(inputs[rank], [3, 1]), total.split([3, 1])[rank])


@ranks(3)
def test_sixteen_bit_floats_are_added_in_float32(rank):
    full = torch.full((3,), [256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)
    assert reduce_scatter_v(full, [1, 1, 1]) == 258


@pytest.mark.gloo_only("NCCL adds up in an order of its own")
@ranks(3)
def test_sixteen_bit_floats_are_added_in_rank_order(rank):
    full = torch.full((3,), [256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)
    assert reduce_scatter_v(full, [1, 1, 1], use_fp32=False) == 256


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@ranks(3)
@in_one_job(layout=LAYOUTS)
def test_gradcheck(rank, world_size, layout):
    inputs = make_inputs(layout, 0, world_size)
    check_gradients_numerically(lambda full: reduce_scatter_v(full, sizes_of(layout, world_size)), inputs, rank)


@ranks(2)
def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"sizes must add up to the tensor's length 5 along dim 0, got \[1, 1\]"):
        reduce_scatter_v(torch.ones(5), [1, 1])
