import enum
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist

from distman import DistmanError, DistributedManager, JobFailed, PlanMismatchError
from distman.collectives import fused_all_reduce
from distman.testing import kill_rank, ranks
from tests.collectives.reference import (
    check_against_one_process,
    check_gradients_numerically,
    in_one_job,
    losses,
    random_tensor,
)

Pair = namedtuple("Pair", ["first", "second"])
LARGE = 5000


@ranks(1, 2, 3, 4)
def test_the_structure_comes_back(rank, world_size):
    tensors = {"b": [torch.ones(2) * rank, (torch.ones(()),)], "a": Pair(torch.zeros(0), torch.ones(2, 1).t())}
    total = fused_all_reduce(tensors)
    assert list(total) == ["b", "a"]
    assert isinstance(total["b"], list)
    assert isinstance(total["b"][1], tuple)
    assert isinstance(total["a"], Pair)
    assert total["b"][0].tolist() == [world_size * (world_size - 1) / 2] * 2
    assert total["b"][1][0] == world_size
    assert total["a"].first.shape == (0,)
    assert total["a"].second.tolist() == [[world_size, world_size]]
    assert tensors["b"][1][0] == 1


@ranks(2)
def test_a_tensor_and_nothing():
    assert fused_all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert fused_all_reduce({}) == {}
    assert fused_all_reduce([]) == []
    assert fused_all_reduce({}, op="avg") == {}
    result, work = fused_all_reduce([], async_op=True)
    assert result == []
    assert work.wait()


@ranks(2)
def test_keys_in_another_order_meet(rank):
    tensors = OrderedDict(a=torch.ones(1), b=torch.zeros(1))
    if rank == 1:
        tensors.move_to_end("a")
    assert {key: value.item() for key, value in fused_all_reduce(tensors).items()} == {"a": 2, "b": 0}


class Name(enum.StrEnum):
    A = "a"


@ranks(2)
def test_keys_that_are_equal_but_look_different_do_not_meet(rank):
    for key in ("a", Name.A):
        assert fused_all_reduce({key: torch.ones(1)}) == {key: 2}
    for keys in (("a", Name.A), (1, True)):
        with pytest.raises(PlanMismatchError):
            fused_all_reduce({keys[rank]: torch.ones(1)})


@ranks(2)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("length", [1, LARGE])
def test_a_result_can_be_changed_in_place(length, needs_grad):
    tensors = [torch.ones(length, requires_grad=needs_grad) for _ in range(2)]
    weight = torch.full((length,), 3.0, requires_grad=True)
    first, second = fused_all_reduce(tensors)
    first.mul_(weight)
    (first + second).sum().backward()
    assert first.tolist() == [6] * length
    assert second.tolist() == [2] * length
    assert weight.grad.tolist() == [2] * length
    assert [tensor.grad is not None for tensor in tensors] == [needs_grad] * 2


@ranks(2)
def test_tensordict():
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict({"x": torch.ones(2, 3), "sub": {"y": torch.ones(2)}}, batch_size=[2])
    total = fused_all_reduce(data)
    assert isinstance(total, tensordict.TensorDict)
    assert total.batch_size == (2,)
    assert total["sub", "y"].tolist() == [2, 2]


@ranks(1, 2, 3)
@in_one_job(length=[1, 50, LARGE])
def test_sum_and_gradient_equal_one_process(rank, world_size, length):
    for weights, dtype in zip(losses(world_size), [torch.float64, torch.float32, torch.complex64], strict=True):
        check_against_one_process(
            lambda tensor: fused_all_reduce({"x": tensor})["x"],
            lambda tensors: [sum(tensors)] * world_size,
            [random_tensor(length, 2, dtype=dtype, seed=one) for one in range(world_size)],
            rank,
            weights,
        )


@ranks(2)
@in_one_job(length=[3, LARGE])
def test_average_and_its_gradient(rank, length):
    check_against_one_process(
        lambda tensor: fused_all_reduce([tensor], op="avg")[0],
        lambda tensors: [sum(tensors) / 2] * 2,
        [random_tensor(length, seed=one) for one in range(2)],
        rank,
        losses(2)[0],
    )


@ranks(2, 3)
def test_gradcheck(rank, world_size):
    inputs = [random_tensor(3, seed=one) for one in range(world_size)]
    check_gradients_numerically(lambda tensor: fused_all_reduce([tensor, tensor.square()])[1], inputs, rank)


@pytest.mark.parametrize(
    ("op", "expected"), [("max", 3.0), (dist.ReduceOp.MIN, 1.0), ("product", 6.0), (dist.ReduceOp.AVG, 2.0)]
)
@ranks(3)
def test_other_operations(rank, op, expected):
    assert fused_all_reduce([torch.tensor(rank + 1.0)], op=op)[0] == expected
    assert fused_all_reduce(torch.full((LARGE,), rank + 1.0), op=op).unique() == expected


@ranks(2)
def test_a_maximum_has_no_gradient():
    tensor = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="must sum or average to have a gradient, got max"):
        fused_all_reduce(tensor, op="max").sum().backward()


@ranks(2)
@in_one_job(length=[1, LARGE])
def test_integers_are_exact(rank, length):
    for big in (2**53 + 1, -(2**53) - 1, 2**62 + 2**43 + 1, 3 - 2**63):
        total = fused_all_reduce([torch.full((length,), big * rank), torch.ones(2, dtype=torch.int32)])
        assert total[0].unique() == big
        assert total[1].dtype == torch.int32
    assert fused_all_reduce(torch.full((length,), 2**62)).unique() == -(2**63)  # as integers do


@ranks(2)
def test_truths_are_joined(rank):
    assert fused_all_reduce(torch.tensor([rank == 0, False])).tolist() == [True, False]


@ranks(3)
def test_sixteen_bit_floats_are_added_in_float32(rank):
    for length in (1, LARGE):
        terms = torch.full((length,), [256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)
        total = fused_all_reduce([terms])[0]
        assert total.dtype == torch.bfloat16
        assert total.unique() == 258


@ranks(2)
def test_integers_beside_floats(rank):
    mixed = {"count": torch.tensor(2**24 + 1), "loss": torch.tensor(0.5)}
    with pytest.raises(ValueError, match=r"all integers or all floats unless buffer_dtype.*torch.float32, torch.int64"):
        fused_all_reduce(mixed)
    total = fused_all_reduce(mixed, buffer_dtype=torch.float64)
    assert total["count"] == 2**25 + 2
    assert total["count"].dtype == torch.int64
    assert rank < 2


@ranks(2)
@in_one_job(length=[1, LARGE])
def test_asynchronously(rank, length):
    mine = torch.full((length,), float(rank), requires_grad=True)
    result, work = fused_all_reduce({"x": mine}, async_op=True)
    other = fused_all_reduce(torch.ones(1))
    assert not work.is_completed()
    assert work.wait()
    assert work.wait()
    assert work.is_completed()
    assert other == 2
    assert result["x"].unique() == 1
    assert not result["x"].requires_grad


@ranks(1, 2)
@in_one_job(length=[1, LARGE])
def test_before_the_end_the_results_are_this_ranks_values(rank, world_size, length):
    mine = random_tensor(length, 2, seed=rank).t()
    (result,), work = fused_all_reduce([mine], async_op=True)
    assert work.is_completed() == (world_size == 1)
    assert torch.equal(result, mine)
    work.wait()
    torch.testing.assert_close(result, sum(random_tensor(length, 2, seed=one).t() for one in range(world_size)))
    torch.testing.assert_close(mine, random_tensor(length, 2, seed=rank).t())


@ranks(4)
def test_a_group_without_rank_0(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    assert fused_all_reduce(torch.tensor(rank), group="pairs") == (1 if rank < 2 else 5)


def other_keys(rank):
    return {"loss": torch.ones(1), **({"extra": torch.ones(1)} if rank == 1 else {})}


def other_shape(rank):
    return {"loss": torch.ones(1 + rank)}


def other_dtype(rank):
    return {"loss": torch.ones(1, dtype=[torch.float32, torch.int64][rank % 2])}


def much_more(rank):
    return {"loss": torch.ones(1 + LARGE * rank)}


def nothing_on_one(rank):
    return {"loss": torch.ones(1)} if rank else {}


DIFFERENT = [other_keys, other_shape, other_dtype, much_more, nothing_on_one]


@pytest.mark.parametrize("make", DIFFERENT, ids=lambda make: make.__name__)
@pytest.mark.parametrize("async_op", [False, True])
@ranks(3)
def test_ranks_that_differ_all_raise(rank, make, async_op):
    def reduce():
        _, work = fused_all_reduce(make(rank), async_op=True) if async_op else (fused_all_reduce(make(rank)), None)
        if work is not None:
            work.wait()

    with pytest.raises(
        PlanMismatchError, match=r"the same keys, shapes, dtypes and operation.*\n  rank 0: .*\n  rank 1: "
    ):
        reduce()
    assert fused_all_reduce(torch.ones(())) > 1


@ranks(2)
def test_different_operations_raise(rank):
    with pytest.raises(PlanMismatchError, match=r"rank 0: sum in torch.float32 of 1 tensors\n  rank 1: max"):
        fused_all_reduce(torch.ones(3), op=["sum", "max"][rank])


@ranks(2)
def test_the_difference_is_named(rank):
    with pytest.raises(PlanMismatchError, match=r"rank 1: .* of 2 tensors, among them \['extra'\] \[1\] torch.float32"):
        fused_all_reduce(other_keys(rank))


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ({"a": 1.0}, {}, r"got float at \['a'\]"),
        (None, {}, "got NoneType at the top"),
        (torch.ones(1), {"op": 3}, "op must be one of sum, .* got 3"),
        (torch.ones(1), {"buffer_dtype": "float64"}, "buffer_dtype must be a torch.dtype or None, got 'float64'"),
        (torch.ones(1), {"device": 1.5}, "device"),
    ],
)
def test_wrong_types_are_found_without_a_manager(tensors, arguments, message):
    with pytest.raises(TypeError, match=message):
        fused_all_reduce(tensors, **arguments)


WRONG = [
    ({"a": 1.0}, {}, TypeError, r"got float at \['a'\]"),
    ("text", {}, TypeError, "got str at the top"),
    (torch.ones(1), {"op": "median"}, ValueError, "op must be one of sum, avg, max, min, product, got 'median'"),
    *[
        (tensors, {"op": "avg", "buffer_dtype": buffer_dtype}, ValueError, "integers must not be averaged")
        for tensors, buffer_dtype in [
            (torch.ones(1, dtype=torch.int64), None),
            (torch.ones(1, dtype=torch.int32), torch.float64),  # the mean would be cut off
            ({"length": torch.tensor(1), "loss": torch.tensor(0.5)}, torch.float64),
            ([torch.ones(1, dtype=torch.bool), torch.ones(1)], None),
            (torch.ones(1), torch.int64),  # and here the terms
        ]
    ],
    (torch.ones(1, dtype=torch.complex64), {"op": "max"}, ValueError, "complex tensors must be summed"),
]


@ranks(2)
def test_wrong_arguments():
    for tensors, arguments, error, message in WRONG:
        with pytest.raises(error, match=message):
            fused_all_reduce(tensors, **arguments)


# Up to 2.10 torch.compile makes an object of every autograd function, and is warned by itself.
AUTOGRAD = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@AUTOGRAD
@ranks(2)
def test_it_can_be_compiled(rank):
    compiled = torch.compile(lambda tensors: fused_all_reduce(tensors), fullgraph=True, backend="aot_eager")
    mine = (torch.ones(2) * rank).requires_grad_()
    total = compiled({"a": mine, "b": torch.ones(3)})
    assert total["a"].tolist() == [1, 1]
    assert total["b"].tolist() == [2, 2, 2]
    ((total["a"] + mine).sum() * (rank + 1)).backward()
    assert mine.grad.tolist() == [3 + rank + 1] * 2


@AUTOGRAD
@pytest.mark.gloo_only("how a dtype is packed does not depend on the backend")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.int32], ids=str)
@ranks(2)
def test_every_dtype_can_be_compiled(rank, dtype):
    compiled = torch.compile(lambda tensors: fused_all_reduce(tensors), fullgraph=True, backend="aot_eager")
    tensors = {"a": random_tensor(2, 3, dtype=dtype, seed=rank), "b": random_tensor(3, dtype=dtype, seed=rank)}
    found, expected = compiled(tensors), fused_all_reduce(tensors)
    for key in tensors:
        torch.testing.assert_close(found[key], expected[key])


@AUTOGRAD
@pytest.mark.gloo_only("in a graph it is what it is without async_op")
@ranks(2)
def test_it_can_be_compiled_asynchronously(rank):
    def reduce(tensor):
        total, work = fused_all_reduce([tensor], async_op=True)
        work.wait()
        return total[0]

    assert torch.compile(reduce, fullgraph=True, backend="aot_eager")(torch.ones(2) * rank).tolist() == [1, 1]


@ranks(2)
def test_channels_last_and_conjugated_tensors(rank):
    images = random_tensor(2, 3, 4, 5, seed=rank).to(memory_format=torch.channels_last)
    both = random_tensor(2, 3, 4, 5) + random_tensor(2, 3, 4, 5, seed=1)
    assert torch.equal(fused_all_reduce(images), both)
    assert torch.equal(fused_all_reduce([images, images])[1], both)
    assert torch.equal(fused_all_reduce([images, images[:1]])[0], both)
    numbers = torch.full((2,), 1 + 2j).conj()
    assert fused_all_reduce(numbers).tolist() == [2 - 4j, 2 - 4j]


@ranks(2)
def test_an_error_stays_an_error(rank):
    _, work = fused_all_reduce(other_keys(rank), async_op=True)
    for _ in range(2):
        with pytest.raises(PlanMismatchError):
            work.wait()
        assert not work.is_completed()


@pytest.mark.parametrize("length", [1, LARGE])
@ranks(2)
def test_results_that_were_not_waited_for_to_the_end_never_pass_for_results(monkeypatch, length):
    def interrupt(*_):
        raise KeyboardInterrupt

    DistributedManager.create_process_subgroup("pair", 2)
    result, work = fused_all_reduce(torch.full((length,), 1.0), group="pair", async_op=True)
    monkeypatch.setattr(result, "copy_", interrupt)  # Ctrl-C arrives within wait()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    monkeypatch.undo()
    for _ in range(2):
        assert not work.is_completed()
        with pytest.raises(DistmanError, match="until the results are there, got an interruption of an earlier one"):
            work.wait()
    assert fused_all_reduce(torch.ones(1)) == 2


@pytest.mark.gloo_only("a rank that is gone breaks no connection of NCCL")
@ranks(2, 3, dies=[1], manager=False)
def test_a_death_before_the_results_are_there_is_the_failure_of_the_job(monkeypatch, rank):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize()
    fused_all_reduce(torch.ones(1))
    work = fused_all_reduce(torch.ones(1), async_op=True)[1] if rank != 1 else None
    dist.barrier()
    kill_rank(1)
    for _ in range(2):
        with pytest.raises(JobFailed, match="rank 1"):
            work.wait()


@ranks(2)
def test_a_buffer_of_no_use():
    for dtype in (torch.bool, torch.complex64, torch.int16, torch.uint16):
        with pytest.raises(ValueError, match="buffer_dtype must be a float or integer dtype that"):
            fused_all_reduce(torch.ones(1), buffer_dtype=dtype)
