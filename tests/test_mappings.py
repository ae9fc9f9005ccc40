"""Parallel regions: the gradients of one loss that every rank holds."""

import pytest
import torch

from distman import DistributedManager, split_sizes
from distman.mappings import (
    copy_to_parallel_region,
    gather_from_parallel_region,
    mark_module_as_shared,
    reduce_from_parallel_region,
    scatter_to_parallel_region,
    unmark_module_as_shared,
)
from distman.testing import ranks
from tests.collectives.reference import in_one_job, random_tensor

LENGTH = 5


@ranks(1, 3)
def test_copy_sums_the_gradients(rank, world_size):
    mine = random_tensor(3).requires_grad_()
    (copy_to_parallel_region(mine) * (rank + 1)).sum().backward()
    assert mine.grad.unique() == world_size * (world_size + 1) / 2


@ranks(1, 3)
def test_reduce_sums_the_values_and_passes_the_gradient(rank, world_size):
    mine = torch.full((2,), float(rank), requires_grad=True)
    total = reduce_from_parallel_region(mine)
    assert total.unique() == world_size * (world_size - 1) / 2
    (total * 3).sum().backward()
    assert mine.grad.unique() == 3
    assert mine.unique() == rank


@ranks(1, 3)
@in_one_job(dim=[0, 1, -1])
def test_scatter_and_gather_are_inverse_in_both_directions(rank, world_size, dim):
    full = random_tensor(LENGTH, LENGTH).requires_grad_()
    part = scatter_to_parallel_region(full, dim)
    assert torch.equal(part, full.split(split_sizes(LENGTH, world_size), dim)[rank])
    weights = random_tensor(LENGTH, LENGTH, seed=1)
    for shapes in (None, split_sizes(LENGTH, world_size)):
        full.grad = None
        again = gather_from_parallel_region(scatter_to_parallel_region(full, dim), dim, shapes)
        assert torch.equal(again, full)
        (again * weights).sum().backward()
        assert torch.equal(full.grad, weights)


@ranks(4)
def test_more_ranks_than_slices(rank):
    full = random_tensor(2).requires_grad_()
    part = scatter_to_parallel_region(full, 0)
    assert part.shape == ((1,) if rank < 2 else (0,))
    gather_from_parallel_region(part.square(), 0).sum().backward()
    torch.testing.assert_close(full.grad, 2 * full.detach())


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@ranks(3)
def test_gradcheck(rank, world_size, dtype):
    weight = random_tensor(LENGTH, LENGTH, dtype=dtype, seed=1).split(split_sizes(LENGTH, world_size))[rank]

    def layer(full):
        hidden = copy_to_parallel_region(full) @ weight.T  # a part of the columns
        whole = gather_from_parallel_region(hidden.tanh())
        part = scatter_to_parallel_region(whole)
        return reduce_from_parallel_region(part @ weight)

    full = random_tensor(2, LENGTH, dtype=dtype).requires_grad_()
    assert torch.autograd.gradcheck(layer, full, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, full, fast_mode=True)


@ranks(3)
def test_sixteen_bit_sums_are_taken_in_float32(rank):
    mine = torch.ones(3, dtype=torch.bfloat16)
    mine[rank] = 256  # in one of the places a 1 is added to it first, whatever the order of the ranks, and is lost
    assert reduce_from_parallel_region(mine).tolist() == [258.0] * 3


@ranks(2)
def test_wrong_dims():
    with pytest.raises(ValueError, match="dim must be between -1 and 0"):
        scatter_to_parallel_region(torch.ones(2), 1)
    with pytest.raises(ValueError, match="dim must be between -1 and 0"):
        gather_from_parallel_region(torch.ones(2), 1)


def data_of(rank, step):
    return random_tensor(2 + rank, 3, seed=10 * step + rank)


def gradients(module, batches):
    module.zero_grad()
    for batch in batches:
        module(batch).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def make_module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


@ranks(1, 2, 3)
def test_shared_parameters_under_accumulation_over_three_batches(rank, world_size):
    module = mark_module_as_shared(make_module())
    found = gradients(module, [data_of(rank, step) for step in range(3)])
    expected = gradients(make_module(), [data_of(one, step) for step in range(3) for one in range(world_size)])
    torch.testing.assert_close(found, expected)


@ranks(4)
def test_shared_over_a_group_and_used_twice_in_one_pass(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    module = mark_module_as_shared(torch.nn.Linear(2, 2, bias=False).double(), "pairs")
    batch = torch.full((1, 2), float(rank), dtype=torch.float64)
    (module(batch) + module(batch)).sum().backward()
    assert module.weight.grad.unique() == 2 * (rank // 2 * 4 + 1)


@ranks(2)
def test_marking_twice_and_unmarking(rank):
    module = mark_module_as_shared(make_module(), recurse=True)
    with pytest.raises(ValueError, match=r"marked as shared already, got \['weight', 'bias'\]"):
        mark_module_as_shared(module[0])
    unmark_module_as_shared(module)
    with pytest.raises(ValueError, match="must be marked as shared to be unmarked"):
        unmark_module_as_shared(module)
    found = gradients(module, [data_of(rank, 0)])
    torch.testing.assert_close(found, gradients(make_module(), [data_of(rank, 0)]))


@ranks(2)
def test_without_recursion_and_with_frozen_parameters(rank):
    module = make_module()
    module[0].bias.requires_grad_(requires_grad=False)
    mark_module_as_shared(module[0], recurse=False)
    module[0](torch.full((1, 3), float(rank), dtype=torch.float64)).sum().backward()
    assert module[0].weight.grad.unique() == 1
    unmark_module_as_shared(module[0], recurse=False)


@ranks(1, 2)
def test_gradients_of_two_parameters_share_no_memory(world_size):
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    for step in (1, 2, 3):
        total = reduce_from_parallel_region(first) + reduce_from_parallel_region(second)
        total.tanh().sum().backward()
        expected = step * (1 - torch.tanh(torch.tensor(2.0 * world_size)) ** 2)
        torch.testing.assert_close(first.grad, expected.expand(4))
        torch.testing.assert_close(second.grad, expected.expand(4))
    assert first.grad.data_ptr() != second.grad.data_ptr()


@ranks(2)
def test_a_marked_module_can_be_saved_and_unmarked_when_frozen(tmp_path, rank):
    module = mark_module_as_shared(make_module())
    torch.save(module, tmp_path / str(rank))
    module.requires_grad_(requires_grad=False)
    unmark_module_as_shared(module)
    module.requires_grad_()
    torch.testing.assert_close(gradients(module, [data_of(rank, 0)]), gradients(make_module(), [data_of(rank, 0)]))
