import itertools

import pytest
import torch

from distman import split_sizes
from distman.collectives import all_to_all_v, distributed_transpose, indexed_all_to_all_v
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

MATRICES = {
    "even": [[2, 2, 2, 2]] * 4,
    "uneven": [[1, 2, 3, 1], [2, 1, 1, 4], [3, 3, 1, 2], [1, 1, 2, 2]],
    "empty": [[0, 2, 1, 0], [0, 0, 0, 0], [3, 0, 1, 2], [1, 0, 0, 0]],
}


def matrix_of(layout, world_size):
    return [row[:world_size] for row in MATRICES[layout][:world_size]]


def make_inputs(sizes, dim, dtype=torch.float64):
    shapes = [[2, 3] for _ in sizes]
    for shape, row in zip(shapes, sizes, strict=True):
        shape[dim] = sum(row)
    return [random_tensor(*shape, dtype=dtype, seed=rank) for rank, shape in enumerate(shapes)]


def exchange_on_one_process(sizes, dim):
    def exchange(inputs):
        slices = [one.split(row, dim) for one, row in zip(inputs, sizes, strict=True)]
        return [torch.cat([row[rank] for row in slices], dim) for rank in range(len(sizes))]

    return exchange


@ranks(1, 2, 3)
@in_one_job(layout=list(MATRICES))
def test_slices_equal_one_process(rank, world_size, layout):
    sizes = matrix_of(layout, world_size)
    for weights, dim in zip(losses(world_size), [0, 1, -1], strict=True):
        check_against_one_process(
            lambda tensor, dim=dim: all_to_all_v(tensor, sizes, dim),
            exchange_on_one_process(sizes, dim),
            make_inputs(sizes, dim),
            rank,
            weights,
        )


@ranks(3)
def test_slices_of_every_dtype(rank, world_size):
    sizes = matrix_of("empty", world_size)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        check_against_one_process(
            lambda tensor: all_to_all_v(tensor, sizes, 1),
            exchange_on_one_process(sizes, 1),
            [strided(one) for one in make_inputs(sizes, 1, dtype)],
            rank,
            losses(world_size)[0],
        )


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@ranks(3)
@in_one_job(layout=list(MATRICES))
def test_gradcheck_of_slices(rank, world_size, layout):
    sizes = matrix_of(layout, world_size)
    check_gradients_numerically(lambda tensor: all_to_all_v(tensor, sizes), make_inputs(sizes, 0), rank)


def indices_of(layout, world_size):
    """For each sender and receiver the indices into a shard of four: some repeated, some never sent."""
    return [
        [
            torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(10 * sender + receiver))
            for receiver, size in enumerate(row)
        ]
        for sender, row in enumerate(matrix_of(layout, world_size))
    ]


def indexed_on_one_process(indices, dim):
    def exchange(inputs):
        return [
            torch.cat([one.index_select(dim, row[rank]) for one, row in zip(inputs, indices, strict=True)], dim)
            for rank in range(len(inputs))
        ]

    return exchange


@ranks(1, 2, 3)
@in_one_job(layout=list(MATRICES))
def test_indexed_equals_one_process(rank, world_size, layout):
    sizes, indices = matrix_of(layout, world_size), indices_of(layout, world_size)
    for weights, dim in zip(losses(world_size), [0, 1, -1], strict=True):
        check_against_one_process(
            lambda tensor, dim=dim: indexed_all_to_all_v(tensor, indices[rank], sizes, dim=dim),
            indexed_on_one_process(indices, dim),
            [random_tensor(4, 4, seed=one) for one in range(world_size)],
            rank,
            weights,
        )


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@ranks(2, 3)
def test_gradcheck_of_indexed(rank, world_size):
    sizes, indices = matrix_of("uneven", world_size), indices_of("uneven", world_size)
    inputs = [random_tensor(4, 2, seed=one) for one in range(world_size)]
    check_gradients_numerically(lambda tensor: indexed_all_to_all_v(tensor, indices[rank], sizes), inputs, rank)


@ranks(2)
def test_indexed_adds_sixteen_bit_gradients_in_float32(rank):
    indices = [torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    weights = [torch.tensor([256.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0])][rank].to(torch.bfloat16)
    for use_fp32, expected in ((True, 258), (False, 256)):
        shard = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        received = indexed_all_to_all_v(shard, indices, [[2, 1], [2, 1]], use_fp32)
        (received * weights).sum().backward()
        assert shard.grad == (expected if rank == 0 else 0)


WRONG = [
    (lambda: all_to_all_v(torch.ones(3), [[1, 1], [1, 1]]), r"sizes\[\d\] must add up to the tensor's length 3"),
    (lambda: all_to_all_v(torch.ones(2), [[1, 1]]), "sizes must have one row for each of the 2 ranks"),
    (lambda: all_to_all_v(torch.ones(2), [[2], [2]]), "each of the 2 ranks"),
    (
        lambda: indexed_all_to_all_v(torch.ones(3), [torch.tensor([0])] * 2, [[1, 2], [2, 1]]),
        "indices must hold as many entries for each rank",
    ),
    (
        lambda: indexed_all_to_all_v(torch.ones(3), [torch.tensor([3])] * 2, [[1, 1], [1, 1]]),
        "indices must be between 0 and 2 along dim 0, got 3 to 3",
    ),
    (lambda: distributed_transpose(torch.ones(2, 2), 1, -1), "dim0 and dim1 must be two dims, got 1 twice"),
    (
        lambda: distributed_transpose(torch.ones(2, 2), 0, 1, sizes=[1, 1]),
        r"must have length sizes\[\d\] = 1 along dim 1, got 2",
    ),
]


@ranks(2)
def test_wrong_arguments():
    for call, message in WRONG:
        with pytest.raises(ValueError, match=message):
            call()


def transpose_on_one_process(dim0, dim1):
    def transpose(shards):
        full = torch.cat(shards, dim1)
        return list(full.split(split_sizes(full.shape[dim0], len(shards)), dim0))

    return transpose


@pytest.mark.parametrize(("dim0", "dim1"), list(itertools.combinations([0, 1, -1], 2)))
@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(1, 2, 3)
def test_transpose_equals_one_process(rank, world_size, layout, dim0, dim1):
    if layout == "uneven":  # there and back once each
        dim0, dim1 = dim1, dim0
    shapes = [[2, 5, 3] for _ in range(world_size)]
    for shape, size in zip(shapes, sizes_of(layout, world_size), strict=True):
        shape[dim1] = size
    inputs = [random_tensor(*shape, seed=one) for one, shape in enumerate(shapes)]
    for weights in losses(world_size):
        for sizes in (None, sizes_of(layout, world_size)):
            check_against_one_process(
                lambda shard, sizes=sizes: distributed_transpose(shard, dim0, dim1, sizes=sizes),
                transpose_on_one_process(dim0, dim1),
                inputs,
                rank,
                weights,
            )


@ranks(2, 3)
def test_transpose_and_back_and_gradcheck(rank, world_size):
    inputs = [random_tensor(4, size, seed=one) for one, size in enumerate(sizes_of("empty", world_size))]
    there = distributed_transpose(inputs[rank], 0, 1)
    assert there.shape == (split_sizes(4, world_size)[rank], sum(sizes_of("empty", world_size)))
    check_gradients_numerically(lambda shard: distributed_transpose(shard, 0, 1), inputs, rank)
