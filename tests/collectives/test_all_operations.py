"""What holds for every differentiable collective alike."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import distman.collectives
import distman.mappings
from distman import DistributedManager, PlanMismatchError, split_sizes
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
from distman.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
)
from distman.testing import ranks
from tests.collectives.reference import check_against_one_process, different_on_each, in_one_job, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which forward mode uses

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
each_operation = in_one_job(name=OPERATIONS)

# Parallel regions are functions of what all ranks hold alike, so their gradients have another reference.
REGIONS = {
    "copy_to_parallel_region": lambda tensor, _: copy_to_parallel_region(tensor),
    "reduce_from_parallel_region": lambda tensor, _: reduce_from_parallel_region(tensor),
    "scatter_to_parallel_region": lambda tensor, _: scatter_to_parallel_region(tensor, 1),
    "gather_from_parallel_region": lambda tensor, _: gather_from_parallel_region(tensor, 1),
}
DIFFERENTIABLE = {
    **{name: (lambda tensor, size, call=call: call(tensor, size, None)) for name, (call, _) in OPERATIONS.items()},
    **REGIONS,
}
each_differentiable = in_one_job(name=DIFFERENTIABLE)


def make_inputs(num_ranks, dtype=torch.float64, *shape):
    return [random_tensor(3, LENGTH, *shape, dtype=dtype, seed=rank) for rank in range(num_ranks)]


@ranks(3)
@each_operation
def test_a_tensor_used_twice(rank, world_size, name):
    operation, reference = OPERATIONS[name]

    def twice(tensor):
        return operation(tensor, world_size, None) * operation(tensor, world_size, None)

    def twice_on_one_process(tensors):
        return [one * one for one in reference(tensors)]

    check_against_one_process(twice, twice_on_one_process, make_inputs(world_size), rank, different_on_each)


@ranks(4)
def test_two_orthogonal_groups_at_the_same_time(rank):
    DistributedManager.create_process_subgroup("rows", 2)
    DistributedManager.create_orthogonal_process_group("columns", "rows")
    for operation, reference in OPERATIONS.values():
        check_two_orthogonal_groups(operation, reference, rank)


def check_two_orthogonal_groups(operation, reference, rank):
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


@ranks(2)
@each_operation
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


@ranks(1, 2)
@each_operation
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


def test_every_differentiable_function_is_here():
    public = {
        name: getattr(module, name) for module in (distman.collectives, distman.mappings) for name in module.__all__
    }
    assert {name for name, one in public.items() if "Differentiable" in (one.__doc__ or "")} == set(DIFFERENTIABLE)


@ranks(2)
@each_differentiable
def test_forward_mode_and_transforms_of_functions_are_refused(rank, name):
    tensor = random_tensor(3, LENGTH, seed=rank)
    with (
        forward_ad.dual_level(),
        pytest.raises((TypeError, PlanMismatchError), match=r"within forward-mode differentiation, .*\. Call"),
    ):
        DIFFERENTIABLE[name](forward_ad.make_dual(tensor, tensor), 2)

    def function(values):
        return DIFFERENTIABLE[name](values, 2)

    for transform in (lambda: torch.func.jvp(function, (tensor,), (tensor,)), lambda: torch.func.vjp(function, tensor)):
        with pytest.raises((TypeError, PlanMismatchError), match=r"within a transform of torch\.func, .*\. Call"):
            transform()
    assert function(tensor).dtype == tensor.dtype


@ranks(3)
@each_differentiable
def test_activation_checkpoints(rank, world_size, name):
    operation = DIFFERENTIABLE[name]

    def layer(tensor):
        return operation(tensor.tanh(), world_size).sin() + operation(tensor, world_size)

    found = []
    for run in (
        layer,
        lambda tensor: checkpoint(layer, tensor, use_reentrant=False),
        lambda tensor: checkpoint(layer, tensor, use_reentrant=True),
    ):
        mine = random_tensor(3, LENGTH, seed=rank).requires_grad_()
        (run(mine) * (rank + 1)).sum().backward()
        found.append(mine.grad)
    torch.testing.assert_close(found[1:], found[:1] * 2)


@ranks(2)
def test_a_checkpoint_around_a_scatter_whose_receivers_pass_nothing(rank):
    weight = torch.ones(2, requires_grad=True)
    full = torch.arange(4.0).requires_grad_() if rank == 0 else None
    result = checkpoint(lambda given: scatter_v(given, [2, 2]) * weight, full, use_reentrant=False)
    result.sum().backward()
    assert weight.grad.tolist() == [[0, 1], [2, 3]][rank]
    assert full is None or full.grad.tolist() == [1] * 4


@ranks(2)
@each_differentiable
def test_autocast_changes_nothing(rank, name):
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.bool):
        tensor = random_tensor(3, LENGTH, dtype=dtype, seed=rank)
        plain = DIFFERENTIABLE[name](tensor, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = DIFFERENTIABLE[name](tensor, 2)
        assert result.dtype == dtype
        assert torch.equal(result, plain)


@ranks(1, 2)
@in_one_job(name=[name for name in DIFFERENTIABLE if name != "copy_to_parallel_region"])
def test_a_result_may_be_changed_in_place(rank, world_size, name):
    for dtype in (torch.float32, torch.bfloat16):
        mine = make_inputs(world_size)[rank].to(dtype).requires_grad_()
        result = DIFFERENTIABLE[name](mine, world_size)
        plain = DIFFERENTIABLE[name](mine, world_size)
        result.mul_(2)
        assert result.equal(2 * plain)
        result.sum().backward()
        (grad,) = torch.autograd.grad(plain.sum(), mine)
        assert mine.grad.equal(2 * grad)
