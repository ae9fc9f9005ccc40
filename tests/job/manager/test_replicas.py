"""Replicas are compared bit for bit, and the rank whose bits differ is named."""

import pickle
import random

import pytest
import torch
from torch import nn

from distman import DistributedManager, DivergenceError
from distman.errors import PlanMismatchError
from distman.handler import NNHandler, ReplicaCheck
from distman.testing import ranks


def model(dtype=torch.float32):
    torch.manual_seed(0)
    first, norm, last = nn.Linear(3, 70, dtype=dtype), nn.BatchNorm1d(70, dtype=dtype), nn.Linear(70, 5, dtype=dtype)
    layers = nn.Sequential(first, norm, last)
    layers.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    return layers


def trained(layers, rank):
    """Take two steps with gradients that are the same on all ranks, while each rank's norm sees batches of its own."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for _ in range(2):
        layers(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).to(layers[0].weight.dtype))
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def flip_bit(tensor, chance):
    """Flip one bit of one entry, as a faulty memory would."""
    data = tensor.detach().view(-1).view(torch.uint8)
    at = chance.randrange(len(data))
    data[at] ^= 1 << chance.randrange(8)


@ranks(1, 3)
def test_equal_replicas_are_fine_though_each_norm_has_its_own_statistics(rank):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layers = model(dtype)
        DistributedManager().check_replicas(layers, trained(layers, rank), step=2)


@ranks(3)
def test_one_flipped_bit_is_found_and_its_tensor_and_rank_are_named(rank):
    for seed in range(8):
        check_a_flipped_bit(rank, seed)


def check_a_flipped_bit(rank, seed):
    chance = random.Random(seed)  # noqa: S311 - it draws no secrets
    layers = model()
    optimizer = trained(layers, rank)
    tensors = dict(layers.named_parameters()) | {"calls": layers.calls}
    states = {f"exp_avg of {name}": optimizer.state[one]["exp_avg"] for name, one in layers.named_parameters()}
    name, guilty = chance.choice([*tensors, *states]), chance.randrange(3)
    if rank == guilty:
        flip_bit((tensors | states)[name], chance)
    with pytest.raises(DivergenceError) as caught:
        DistributedManager().check_replicas(layers, optimizer, step=7)
    assert (caught.value.tensors, caught.value.ranks, caught.value.step) == ([name], [guilty], 7)
    place = DistributedManager().roll_call[guilty]
    assert str(caught.value) == (
        f"replicas must hold the same numbers in step 7, but {place} differs from the others in {name}. Resume from a "
        "checkpoint, and run `distman check --quick` on these hosts."
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own
    DistributedManager().barrier()  # the job goes on


def wrong_sign(tensor):
    tensor.neg_()


def other_rows(tensor):
    tensor.copy_(tensor.flip(0))


def other_columns(tensor):
    tensor.copy_(tensor.flip(1))


def far_rows(tensor):
    tensor[[0, -1]] = tensor[[-1, 0]]


def top_bits(tensor):
    data = tensor.view(-1).view(torch.uint8)
    data[tensor.element_size() - 1 :: tensor.element_size()] ^= 0xC0


@ranks(2)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 256), torch.float32),
        ((64, 256), torch.float64),
        ((64, 256), torch.float16),
        ((300, 512), torch.float32),
        ((5, 3), torch.float16),
        ((5, 3), torch.float64),
        ((9000, 128), torch.float16),
    ],
)
def test_what_a_plain_sum_would_not_see_is_found(rank, shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).sign().to(dtype)
    weight[0, 0], weight[-1, -1] = 2, 3
    layers = nn.Linear(1, 1, bias=False)
    for change in (wrong_sign, other_rows, other_columns, far_rows, top_bits):
        layers.weight = nn.Parameter(weight.clone())
        DistributedManager().check_replicas(layers)
        if rank == 1:
            with torch.no_grad():
                change(layers.weight)
        with pytest.raises(DivergenceError, match="in weight"):
            DistributedManager().check_replicas(layers)


@ranks(2)
@pytest.mark.parametrize("which", [0, 1])
def test_states_of_parameters_beside_the_module_are_compared(rank, which):
    torch.manual_seed(0)
    layers, beside = nn.Linear(1, 1), [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for parameter in (*layers.parameters(), *beside):
        parameter.grad = torch.ones_like(parameter)
    optimizers = [torch.optim.Adam([*layers.parameters(), *beside]), torch.optim.SGD(beside, momentum=0.9)]
    for optimizer in optimizers:
        optimizer.step()
    DistributedManager().check_replicas(layers, *optimizers)
    if rank == 1:
        optimizers[0].state[beside[which]]["exp_avg"] += 1
    with pytest.raises(DivergenceError, match=f"differ in exp_avg of parameter {2 + which} in optimizer 0"):
        DistributedManager().check_replicas(layers, *optimizers)


@ranks(2)
def test_states_in_lists_are_compared(rank):
    torch.manual_seed(0)
    layers = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(layers.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = layers(torch.ones(1, 2)).exp().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    DistributedManager().check_replicas(layers, optimizer)
    if rank == 1:
        optimizer.state[layers.weight]["old_dirs"][-1] += 1
    with pytest.raises(DivergenceError, match=r"differ in old_dirs\[\d\] of weight"):
        DistributedManager().check_replicas(layers, optimizer)


@ranks(2)
def test_of_two_ranks_that_differ_both_are_named(rank):
    layers = model()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter += rank
    with pytest.raises(DivergenceError, match=r"but rank 0 \(.*\) and rank 1 \(.*\) differ in 0.weight, ") as caught:
        DistributedManager().check_replicas(layers)
    assert caught.value.ranks == [0, 1]
    assert len(caught.value.tensors) == 6
    assert "and 1 more. Resume" in str(caught.value)


@ranks(2)
def test_a_buffer_that_each_rank_has_for_itself_can_be_left_out(rank):
    layers = model()
    layers.calls += rank
    DistributedManager().check_replicas(layers, buffers=False)
    with pytest.raises(DivergenceError):
        DistributedManager().check_replicas(layers)


@ranks(2)
def test_synchronized_statistics_are_compared(rank):
    layers = nn.SyncBatchNorm(3)
    layers.running_mean += rank
    with pytest.raises(DivergenceError, match="running_mean"):
        DistributedManager().check_replicas(layers)


@ranks(2)
def test_other_modules_are_refused(rank):
    with pytest.raises(PlanMismatchError, match="modules with the same parameters and buffers"):
        DistributedManager().check_replicas(nn.Linear(2, 2, bias=rank == 0))
    with pytest.raises(PlanMismatchError):
        DistributedManager().check_replicas(nn.Linear(2, 2) if rank else nn.Identity())


@ranks(4)
def test_of_sharded_parameters_the_replicated_axis_is_compared(rank):
    manager = DistributedManager()
    manager.initialize_mesh((2, 2), ("copy", "shard"))
    layers = manager.wrap_fsdp(model(), mesh=("copy", "shard"))
    manager.check_replicas(layers)
    weight = layers[0].weight.to_local()
    if rank == 3:
        flip_bit(weight, random.Random(0))  # noqa: S311 - it draws no secrets
    if rank in (1, 3):  # which hold the same shard
        with pytest.raises(DivergenceError, match=r"rank 1 \(.*\) and rank 3 \(.*\) differ in 0.weight"):
            manager.check_replicas(layers)
    else:
        manager.check_replicas(layers)


@ranks(2)
@pytest.mark.parametrize("every", [2, 3])
def test_a_training_ends_at_the_first_check_after_the_ranks_differ(rank, every):
    class Flip(ReplicaCheck):
        def on_step_end(self, handler, step):
            if rank == 1 and step == 4:
                flip_bit(handler.module.weight, random.Random(step))  # noqa: S311 - it draws no secrets
            super().on_step_end(handler, step)

    handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
    handler.set_optimizer(torch.optim.SGD, lr=0.0)
    handler.set_loss_fn(torch.nn.functional.mse_loss)
    handler.set_train_loader(torch.utils.data.TensorDataset(torch.ones(40, 1), torch.ones(40, 1)), batch_size=2)
    handler.add_callback(Flip(every))
    with pytest.raises(DivergenceError) as caught:
        handler.train(1)
    assert caught.value.step == {2: 4, 3: 6}[every]


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (2.5, TypeError), (None, TypeError)])
def test_a_number_of_steps_must_be_one(every, error):
    with pytest.raises(error, match="every must be"):
        ReplicaCheck(every)
