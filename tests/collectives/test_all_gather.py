import pytest
import torch

from distman import DistributedManager
from distman.collectives import all_gather_v
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

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


def make_inputs(layout, dim, world_size, dtype=torch.float64):
    shapes = [[2, 3, 2] for _ in range(world_size)]
    for shape, size in zip(shapes, sizes_of(layout, world_size), strict=True):
        shape[dim] = size
    return [random_tensor(*shape, dtype=dtype, seed=rank) for rank, shape in enumerate(shapes)]


@ranks(1, 2, 3)
@in_one_job(layout=LAYOUTS)
def test_equals_one_process(rank, world_size, layout):
    for weights, dim in zip(losses(world_size), [0, 1, -1], strict=True):
        for sizes in (None, sizes_of(layout, world_size)):
            check_against_one_process(
                lambda shard, sizes=sizes, dim=dim: all_gather_v(shard, sizes, dim),
                lambda shards, dim=dim: [torch.cat(shards, dim)] * world_size,
                make_inputs(layout, dim, world_size),
                rank,
                weights,
            )


@ranks(3)
def test_every_dtype_with_a_gradient(rank, world_size):
    for dtype in DTYPES:
        inputs = [strided(one) for one in make_inputs("empty", 1, world_size, dtype)]
        check_against_one_process(
            lambda shard: all_gather_v(shard, dim=1),
            lambda shards: [torch.cat(shards, 1)] * world_size,
            inputs,
            rank,
            losses(world_size)[0],
        )


@ranks(3)
def test_every_dtype_without_a_gradient(rank, world_size):
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        inputs = make_inputs("empty", 1, world_size, dtype)
        assert torch.equal(all_gather_v(inputs[rank], dim=1), torch.cat(inputs, 1)), dtype


@ranks(2)
def test_channels_last_input(rank):
    inputs = [random_tensor(2, 3, 4, 5, seed=one).to(memory_format=torch.channels_last) for one in range(2)]
    assert torch.equal(all_gather_v(inputs[rank], dim=2), torch.cat(inputs, 2))


@ranks(3)
@in_one_job(layout=LAYOUTS)
def test_gradcheck(rank, world_size, layout):
    inputs = [one[:, 0] for one in make_inputs(layout, 0, world_size)]  # each number takes many calls
    check_gradients_numerically(lambda shard: all_gather_v(shard, sizes_of(layout, world_size)), inputs, rank)


@pytest.mark.gloo_only("what travels for a second derivative does so for the first ones, which are compared over both")
@ranks(2)
def test_gradcheck_of_complex_numbers(rank):
    inputs = [one[:, 0] for one in make_inputs("uneven", 0, 2, torch.complex128)]
    check_gradients_numerically(all_gather_v, inputs, rank)


@ranks(2)
def test_a_tensor_used_twice_gets_both_gradients(rank):
    shard = torch.tensor([1.0 + rank], requires_grad=True)
    (all_gather_v(shard).sum() + 3 * all_gather_v(shard).sum()).backward()
    assert shard.grad == 8


@ranks(2)
def test_a_shard_without_gradient_beside_one_with(rank):
    shard = torch.ones(2, requires_grad=rank == 0)
    all_gather_v(shard).sum().backward()
    assert (shard.grad is not None) == (rank == 0)


@ranks(3)
def test_sixteen_bit_gradients_are_summed_in_float32(rank):
    weights = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)  # 256 + 1 rounds to 256 in bfloat16
    shard = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    (all_gather_v(shard) * weights[rank]).sum().backward()
    assert shard.grad == 258


@pytest.mark.gloo_only("NCCL adds up in an order of its own")
@ranks(3)
def test_sixteen_bit_gradients_are_summed_as_they_are_where_that_is_wanted(rank):
    weights = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    shard = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    (all_gather_v(shard, use_fp32=False) * weights[rank]).sum().backward()
    assert shard.grad == 256


@ranks(4)
def test_two_orthogonal_groups_that_do_not_all_hold_rank_0(rank):
    DistributedManager.create_process_subgroup("rows", 2)
    DistributedManager.create_orthogonal_process_group("columns", "rows")
    shard = torch.full((rank + 1,), float(rank), requires_grad=True)
    row, column = all_gather_v(shard, group="rows"), all_gather_v(shard, group="columns")
    first, other = rank - rank % 2, rank % 2
    assert row.tolist() == [float(first)] * (first + 1) + [first + 1.0] * (first + 2)
    assert column.tolist() == [float(other)] * (other + 1) + [other + 2.0] * (other + 3)
    (row.sum() * (rank + 1) + column.sum() * 10).backward()
    assert shard.grad.unique() == (first + 1) + (first + 2) + 20


@ranks(2)
def test_a_process_group_of_torch_and_results_of_its_own():
    shard = torch.ones(2)
    full = all_gather_v(shard, group=torch.distributed.group.WORLD)
    full += 1
    assert shard.tolist() == [1, 1]


@ranks(1)
def test_one_rank_gets_a_new_tensor():
    shard = torch.ones(2)
    all_gather_v(shard).add_(1)
    assert shard.tolist() == [1, 1]


@ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [1, 2, 3]}, "sizes must hold one number, 0 or more, for each of the 2 ranks of group 'world'"),
        ({"sizes": [5, 5]}, r"must have length sizes\[\d\] = 5 along dim 0, got 2"),
        ({"sizes": [-1, 2]}, "0 or more"),
        ({"dim": 2}, "dim must be between -1 and 0 for a tensor of 1 dims, got 2"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        all_gather_v(torch.ones(2), **arguments)


@ranks(2)
def test_shards_that_do_not_fit_are_named_on_all_ranks(rank):
    with pytest.raises(
        ValueError, match=r"all dims but 0.*\n  rank 0: dim 0 of torch.float32 \[2, 3\]\n  rank 1: .*\[2, 4\]"
    ):
        all_gather_v(torch.ones(2, 3 + rank))
    with pytest.raises(
        ValueError, match=r"dtype.*\n  rank 0: dim 0 of torch.float32 \[2\]\n  rank 1: dim 0 of torch.float64 \[2\]"
    ):
        all_gather_v(torch.ones(2, dtype=[torch.float32, torch.float64][rank]))
    assert all_gather_v(torch.ones(1)).tolist() == [1, 1]


@ranks(2)
def test_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"tensor must be a torch\.Tensor, got list"):
        all_gather_v([1, 2])


@ranks(2)
def test_another_dim_or_none_on_one_rank_is_an_error_on_both(rank):
    with pytest.raises(ValueError, match=r"equal in dim.*\n  rank 0: dim 0 of .*\n  rank 1: dim 1 of "):
        all_gather_v(torch.ones(2, 2), dim=rank)
    message = "dim must be between -2 and 1" if rank else r"rank 1: dim out of range of"
    with pytest.raises(ValueError, match=message):
        all_gather_v(torch.ones(2, 2), dim=rank * 5)
    with pytest.raises(ValueError, match="must have at least one dim, got a scalar"):
        all_gather_v(torch.ones(()))


@ranks(2)
def test_conjugated_and_negated_views(rank):
    inputs = [random_tensor(3, dtype=torch.complex128, seed=one) for one in range(2)]
    assert torch.equal(all_gather_v(inputs[rank].conj()), torch.cat(inputs).conj())
    assert torch.equal(all_gather_v(inputs[rank].conj().imag), torch.cat(inputs).conj().imag)
    check_against_one_process(
        lambda shard: all_gather_v(shard.conj()).conj() * all_gather_v(shard),
        lambda shards: [torch.cat(shards) ** 2] * 2,
        inputs,
        rank,
        losses(2)[0],
    )
