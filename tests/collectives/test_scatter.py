import pytest
import torch

from distman.collectives import scatter_v
from distman.errors import PlanMismatchError
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
    sizes, src = sizes_of(layout, world_size), world_size - 1
    for weights, dim in zip(losses(world_size), [0, 1, -1], strict=True):
        check_against_one_process(
            lambda full, dim=dim: scatter_v(full, sizes, dim, src),
            lambda fulls, dim=dim: list(fulls[src].split(sizes, dim)),
            make_inputs(layout, dim, world_size),
            rank,
            weights,
        )


@ranks(3)
@in_one_job(dtype=[torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_receivers_need_to_know_nothing(rank, world_size, dtype):
    full = strided(make_inputs("empty", 1, world_size, dtype)[0])
    sizes = sizes_of("empty", world_size)
    part = scatter_v(full if rank == 0 else None, sizes, 1)
    assert part.dtype == dtype
    assert torch.equal(part, full.split(sizes, 1)[rank])


@ranks(3)
def test_the_gradient_comes_back_from_ranks_that_passed_none(rank):
    full = random_tensor(4, 2).requires_grad_() if rank == 1 else None
    (scatter_v(full, [1, 0, 3], src=1) * (rank + 1)).sum().backward()
    if rank == 1:
        assert full.grad.tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]]


@ranks(2)
@in_one_job(other=["a text", 3, [torch.ones(2)]])
def test_other_ranks_may_pass_anything(rank, other):
    full = torch.ones(3, requires_grad=True)
    scatter_v(full if rank == 0 else other, [1, 2]).sum().backward()
    assert rank == 1 or full.grad.tolist() == [1, 1, 1]


@ranks(2)
def test_no_gradient_is_asked_of_anybody_where_the_source_needs_none(rank):
    other = torch.ones(3, requires_grad=True)
    assert not scatter_v(torch.ones(3) if rank == 0 else other, [1, 2]).requires_grad
    with torch.no_grad():
        assert not scatter_v(other, [1, 2]).requires_grad


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@ranks(3)
@in_one_job(layout=LAYOUTS)
def test_gradcheck(rank, world_size, layout):
    inputs = make_inputs(layout, 0, world_size)
    check_gradients_numerically(lambda full: scatter_v(full, sizes_of(layout, world_size)), inputs, rank, twice=False)


@ranks(2)
@pytest.mark.parametrize(
    ("full", "dim", "own_message"),
    [
        (torch.ones(5), 0, "sizes must add up to the tensor's length 5 along dim 0"),
        (torch.ones(3), 1, "dim must be between -1 and 0"),
        (None, 0, "must be a tensor on rank src, got None"),
        ([1, 2, 3], 0, "tensor must be a torch.Tensor, got list"),
    ],
)
def test_what_is_wrong_on_the_source_is_said_on_all_ranks(rank, full, dim, own_message):
    error = (TypeError, ValueError) if rank == 0 else PlanMismatchError
    with pytest.raises(error, match=own_message):
        scatter_v(full if rank == 0 else None, [1, 2], dim)
    assert scatter_v(torch.arange(2) if rank == 0 else None, [1, 1]) == rank


@ranks(2)
def test_wrong_arguments():
    with pytest.raises(ValueError, match="src must be a rank in group 'world', 0 to 1, got -1"):
        scatter_v(torch.ones(2), [1, 1], src=-1)
    with pytest.raises(ValueError, match="each of the 2 ranks"):
        scatter_v(torch.ones(2), [2])
