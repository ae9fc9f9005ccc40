"""What holds for every differentiable collective alike."""

import pytest
import torch

from distman import DistributedManager, split_sizes
from distman.collectives import (
    all_gather_v,
    all_to_all_v,
    distributed_transpose,
    fused_all_reduce,
    gather_v,
    indexed_all_to_all_v,
    reduce_scatter_v,
    scatter_v,
)
from distman.testing import ranks
from tests.collectives.reference import check_against_one_process, different_on_each, random_tensor

LENGTH = 4  # along dim 1, of the tensors of all ranks


def parts(num_ranks):
    return split_sizes(LENGTH, num_ranks)


def of_rank_0(tensors, values):
    return [values, *[values[:, :0]] * (len(tensors) - 1)]


def first_and_last(num_ranks):
    return [torch.tensor([0, LENGTH - 1])] * num_ranks


# For each operation: what a rank calls with its tensor and the number of ranks, and the results of all ranks.
OPERATIONS = {
    "all_gather_v": (
        lambda tensor, _, group: all_gather_v(tensor, dim=1, group=group),
        lambda tensors: [torch.cat(tensors, 1)] * len(tensors),
    ),
    "gather_v": (
        lambda tensor, _, group: gather_v(tensor, dim=1, group=group),
        lambda tensors: of_rank_0(tensors, torch.cat(tensors, 1)),
    ),
    "scatter_v": (
        lambda tensor, size, group: scatter_v(tensor, parts(size), 1, group=group),
        lambda tensors: list(tensors[0].split(parts(len(tensors)), 1)),
    ),
    "reduce_scatter_v": (
        lambda tensor, size, group: reduce_scatter_v(tensor, parts(size), 1, group=group),
        lambda tensors: list(sum(tensors).split(parts(len(tensors)), 1)),
    ),
    "all_to_all_v": (
        lambda tensor, size, group: all_to_all_v(tensor, [parts(size)] * size, 1, group),
        lambda tensors: [
            torch.cat([one.split(parts(len(tensors)), 1)[rank] for one in tensors], 1) for rank in range(len(tensors))
        ],
    ),
    "indexed_all_to_all_v": (
        lambda tensor, size, group: indexed_all_to_all_v(
            tensor, first_and_last(size), [[2] * size] * size, dim=1, group=group
        ),
        lambda tensors: [torch.cat([one[:, [0, LENGTH - 1]] for one in tensors], 1)] * len(tensors),
    ),
    "distributed_transpose": (
        lambda tensor, _, group: distributed_transpose(tensor, 0, 1, group),
        lambda tensors: list(torch.cat(tensors, 1).split(split_sizes(len(tensors[0]), len(tensors)), 0)),
    ),
    "fused_all_reduce": (
        lambda tensor, _, group: fused_all_reduce({"a": tensor}, group=group)["a"],
        lambda tensors: [sum(tensors)] * len(tensors),
    ),
}
each_operation = pytest.mark.parametrize("name", list(OPERATIONS))


def make_inputs(num_ranks, dtype=torch.float64, *shape):
    return [random_tensor(3, LENGTH, *shape, dtype=dtype, seed=rank) for rank in range(num_ranks)]


@each_operation
@ranks(2, 3)
def test_a_tensor_used_twice(rank, world_size, name):
    operation, reference = OPERATIONS[name]

    def twice(tensor):
        return operation(tensor, world_size, None) * operation(tensor, world_size, None)

    def twice_on_one_process(tensors):
        return [one * one for one in reference(tensors)]

    check_against_one_process(twice, twice_on_one_process, make_inputs(world_size), rank, different_on_each)


@each_operation
@ranks(4)
def test_two_orthogonal_groups_at_the_same_time(rank, name):
    operation, reference = OPERATIONS[name]
    DistributedManager.create_process_subgroup("rows", 2)
    DistributedManager.create_orthogonal_process_group("columns", "rows")
    inputs = make_inputs(4)
    mine = inputs[rank].clone().requires_grad_()
    results = {group: operation(mine, 2, group) for group in ("rows", "columns")}
    sum((result * (rank + 1)).sum() for result in results.values()).backward()

    leaves = [one.clone().requires_grad_() for one in inputs]
    blocks = {"rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]}
    total = torch.zeros((), dtype=torch.float64)
    for group, members in blocks.items():
        for block in members:
            expected = reference([leaves[one] for one in block])
            if rank in block:
                torch.testing.assert_close(results[group], expected[block.index(rank)])
            total = total + sum((result * (one + 1)).sum() for one, result in zip(block, expected, strict=True))
    total.backward()
    expected_grad = torch.zeros_like(mine) if leaves[rank].grad is None else leaves[rank].grad
    torch.testing.assert_close(mine.grad, expected_grad)


@each_operation
@ranks(2)
def test_channels_last_and_conjugated_input(rank, name):
    operation, reference = OPERATIONS[name]
    images = make_inputs(2, torch.float64, 2, 5)
    last = images[rank].to(memory_format=torch.channels_last)
    assert torch.equal(operation(last, 2, None), reference(images)[rank])
    check_against_one_process(
        lambda tensor: operation(tensor.conj(), 2, None).conj() * 2,
        lambda tensors: [one * 2 for one in reference(tensors)],
        make_inputs(2, torch.complex128),
        rank,
        different_on_each,
    )


@each_operation
@ranks(1, 2)
def test_neither_results_nor_gradients_share_memory_with_what_was_given(rank, world_size, name):
    operation, _ = OPERATIONS[name]
    mine = make_inputs(world_size)[rank].requires_grad_()
    result = operation(mine, world_size, None)
    grad = torch.ones_like(result)
    result.backward(grad)
    before = mine.grad.clone()
    grad += 1
    with torch.no_grad():
        result += 1
    assert torch.equal(mine.grad, before)
    assert torch.equal(mine, make_inputs(world_size)[rank])
