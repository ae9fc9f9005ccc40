"""Loops of one's own: on any number of ranks what a plain loop of torch does on one."""

import copy
import io
import logging.handlers
import queue

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distman.handler
from distman import DistributedManager, Stepper
from distman._base.seeds import seed_of
from distman.collectives import all_gather_objects
from distman.data import distributed_loader, rank_cached_loader
from distman.errors import DistmanError
from distman.metrics import aggregate_loss
from distman.testing import ranks

from ..handler.problems import Network, assert_same_on_all_ranks, regression

GLOBAL_BATCH = 12  # over 1, 2 or 3 ranks; the last batch of 65 samples has 5
SEED = 1


def plain_loop(epochs, *, accumulate, clip_norm):
    """Return the weights that a plain loop over whole batches arrives at, and the loss of each of its steps."""
    torch.manual_seed(SEED)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    inputs, targets = regression().tensors
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed_of(SEED, epoch)))
        for window in order.split(GLOBAL_BATCH * accumulate):
            loss = mse_loss(model(inputs[window]), targets[window])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return model.state_dict(), losses


@ranks(1, 3)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_five_changed_lines_make_the_plain_loop_one_of_any_number_of_ranks(accumulate, world_size):
    torch.manual_seed(SEED)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = distributed_loader(regression(), batch_size=GLOBAL_BATCH // world_size, seed=SEED)
    stepper = Stepper(model, optimizer, clip_norm=0.5)
    losses, sums = [], torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        for inputs, targets in stepper.batches(loader, accumulate=accumulate):
            loss = mse_loss(model(inputs), targets)
            stepper.backward(loss)
            sums += torch.tensor([loss.item() * stepper.num_own, stepper.num_own], dtype=torch.float64)
            if stepper.step():
                total, num_samples = sum(all_gather_objects(sums))
                losses.append((total / num_samples).item())
                sums.zero_()
    expected, expected_losses = plain_loop(2, accumulate=accumulate, clip_norm=0.5)
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=0)
    assert_same_on_all_ranks(model)
    assert stepper.num_steps == len(expected_losses)


@ranks(1, 2)
def test_what_is_printed_and_logged_comes_from_rank_0(rank, world_size, monkeypatch):
    lines = logging.handlers.QueueHandler(queue.SimpleQueue())
    logger = logging.getLogger("distman.training")
    monkeypatch.setattr(logger, "handlers", [lines])
    monkeypatch.setattr(logger, "level", logging.INFO)
    model = nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5))
    file = io.StringIO()
    for (inputs,) in stepper.batches([(torch.full((1, 1), 1.0 + rank),)]):
        loss = model(inputs).square().mean()
        stepper.backward(loss)
        stepper.step()
    stepper.print("rank", rank, sep="=", file=file)
    stepper.log({"loss": torch.tensor(0.25), "lr": 0.5})
    stepper.log({"rank": aggregate_loss(rank)}, step=7)
    is_main = rank == 0
    assert file.getvalue() == ("rank=0\n" if is_main else "")
    expected = ["step 1: loss 0.25, lr 0.5", f"step 7: rank {(world_size - 1) / 2:.4g}"]
    assert [lines.queue.get_nowait().getMessage() for _ in range(lines.queue.qsize())] == expected * is_main


@ranks(1)
def test_a_stepper_says_what_it_is_and_is_the_same_by_each_of_its_names():
    model = nn.Linear(1, 1)
    optimizers = {"one": torch.optim.SGD([model.weight], lr=0.1), "two": torch.optim.Adam([model.bias])}
    assert repr(Stepper(model, optimizers)) == "Stepper(Linear, one=SGD, two=Adam, num_steps=0)"
    assert distman.handler.Stepper is distman.training.Stepper is Stepper


class Fourier(nn.Module):
    """A model with features that are drawn, and with other buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(1, 8))
        self.register_buffer("order", torch.randperm(8), persistent=False)
        self.last = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.last((inputs @ self.frequencies).sin()[:, self.order])


@ranks(1, 3)
@pytest.mark.parametrize("is_trained", [False, True])
def test_all_ranks_begin_with_the_weights_and_buffers_of_rank_0(is_trained, rank):
    torch.manual_seed(rank)
    model = Fourier().requires_grad_(is_trained)
    before = copy.deepcopy(model)
    Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_same_on_all_ranks(model)
    outputs = all_gather_objects((model(torch.ones(1, 1)).item(), before(torch.ones(1, 1)).item()))
    assert {after for after, _ in outputs} == {outputs[0][1]}


@ranks(2)
def test_ranks_with_unequal_numbers_of_batches_make_the_same_steps(rank):
    model = Network()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = regression().tensors
    loader = DataLoader(TensorDataset(inputs[: 8 + 24 * rank], targets[: 8 + 24 * rank]), batch_size=8)
    for _ in range(2):
        num_batches = 0
        for own_inputs, own_targets in stepper.batches(loader):
            stepper.backward(mse_loss(model(own_inputs), own_targets))
            stepper.step()
            num_batches += 1
        assert num_batches == 4
    assert_same_on_all_ranks(model)


@ranks(2, 4)
@pytest.mark.parametrize("kind", ["sampled", "cached"])
def test_a_loader_of_some_of_the_ranks_is_refused_but_to_evaluate(kind, world_size):
    size = world_size // 2
    DistributedManager.create_process_subgroup("some", size)
    make = rank_cached_loader if kind == "cached" else distributed_loader
    model = nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=rf"over all ranks, got one for {size}\. Leave its group out, or train by NNH"):
        next(stepper.batches(make(TensorDataset(torch.ones(4, 1)), batch_size=2, group="some")))
    loader = make(TensorDataset(torch.ones(4, 1)), batch_size=4 // size, evaluation=True, group="some")
    assert [len(batch) for (batch,) in stepper.batches(loader)] == [4 // size]


@ranks(1, 2)
def test_a_loop_goes_on_with_the_next_order_of_a_sampler(rank, world_size):
    """A loader of its own is told of the epoch, also after a resumption."""
    data = TensorDataset(torch.arange(8.0)[:, None])

    def run(epochs, state=None):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01))
        if state is not None:
            stepper.load_state_dict(state)
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, world_size, rank, seed=3))
        seen = []
        for _ in range(epochs):
            for (inputs,) in stepper.batches(loader):
                seen.append(inputs.flatten().tolist())
                stepper.backward(model(inputs).square().mean())
                stepper.step()
        return seen, copy.deepcopy(stepper.state_dict())

    whole, last = run(3)
    first, state = run(1)
    rest, resumed = run(2, state)
    assert first + rest == whole
    assert torch.equal(resumed["model"]["module"]["weight"], last["model"]["module"]["weight"])


@ranks(1, 2)
def test_a_state_that_would_lack_a_part_of_a_step_is_refused():
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01), ema_decay=0.5)
    loader = distributed_loader(TensorDataset(torch.ones(8, 1)), batch_size=1)

    def loop(*calls, accumulate=1):
        for batch in stepper.batches(loader, accumulate=accumulate):
            for call in calls:
                call(batch)

    def learn(batch):
        stepper.backward(model(batch[0]).square().mean())

    def take_state(_):
        taken.append(stepper.state_dict()["optimization"]["num_steps"])

    taken = []
    with pytest.raises(DistmanError, match=r"must be taken in the last batch of a step"):
        loop(learn, take_state, accumulate=2)
    with pytest.raises(DistmanError, match=r"must be used by a step\(\)"):
        loop(learn, take_state)
    with pytest.raises(DistmanError, match=r"backward\(\) must be called before the state of its step is taken"):
        loop(take_state, learn)
    taken.clear()
    first = stepper.num_steps + 1
    loop(learn, lambda _: stepper.step(), take_state)
    assert taken == [*range(first, stepper.num_steps + 1)]


class Counts(nn.Module):
    """A model that counts its calls, those of batches with weight 0 left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs):
        self.count += 1
        return self.second(self.first(inputs).tanh()) + self.count


@ranks(1, 3)
@pytest.mark.parametrize(("num_optimizers", "accumulate"), [(1, 2), (2, 1), (2, 2)])
def test_a_loop_that_is_left_after_a_step_has_taken_it(num_optimizers, accumulate):
    data = torch.randn(19, 2, generator=torch.Generator().manual_seed(0))  # on 3 ranks, two have none in the last batch

    def run(leave_at=None):
        torch.manual_seed(0)
        model, num_taken, states = Counts(), 0, []
        parts = [model] if num_optimizers == 1 else [model.first, model.second]
        optimizers = {str(index): torch.optim.Adam(part.parameters()) for index, part in enumerate(parts)}
        stepper = Stepper(model, optimizers, ema_decay=0.5)
        for batch in stepper.batches(distributed_loader(data, batch_size=2, shuffle=False), accumulate=accumulate):
            for name in optimizers:
                stepper.backward(model(batch).square().mean(), name)
                is_taken = stepper.step(name)
            num_taken += is_taken
            if is_taken and num_taken == leave_at:
                stepper.backward(model.second.bias.sum(), name)  # which waits, and is forgotten
                break
            if is_taken and leave_at is None:
                states.append(copy.deepcopy(stepper.state_dict()))
        assert stepper.num_steps == num_taken
        return states or [stepper.state_dict()]

    for index, expected in enumerate(run(), start=1):
        (state,) = run(leave_at=index)
        assert state["optimization"]["num_steps"] == index
        for part in ("module", "average"):
            torch.testing.assert_close(state["model"][part], expected["model"][part], rtol=0, atol=0)


@ranks(1, 2)
@pytest.mark.parametrize("saved", [None, 0.9])
@pytest.mark.parametrize("wanted", [None, 0.5])
def test_a_state_is_gone_on_with_by_the_average_that_the_program_wants(wanted, saved):
    def loop(stepper, num_steps):
        for inputs in stepper.batches([torch.ones(4, 1)] * num_steps):
            stepper.backward(stepper.module(inputs).square().mean())
            stepper.step()

    def make(decay):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), ema_decay=decay)

    first, second = make(saved), make(wanted)
    loop(first, 3)
    loop(second, 1)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    assert (second.ema_module is None) == (wanted is None)
    if wanted is None:
        return
    average = (first.ema_module or first.module).weight.detach().clone()
    assert torch.equal(second.ema_module.weight, average)
    loop(second, 1)
    weight = second.module.weight
    expected = weight if saved is None else wanted * average + (1 - wanted) * weight  # the first update copies
    torch.testing.assert_close(second.ema_module.weight, expected)


@ranks(1, 3)
def test_an_evaluation_reads_each_sample_once_with_the_buffers_of_rank_0(rank):
    model = torch.nn.BatchNorm1d(1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = float(rank)
    model.running_mean.fill_(own)
    loader = distributed_loader(torch.arange(5.0)[:, None], evaluation=True, batch_size=2)
    read = []
    with torch.no_grad():
        for batch in stepper.batches(loader):
            assert model.running_mean.item() == 0
            read += batch[:, 0].tolist()
    assert model.running_mean.item() == own
    assert sorted(number for one in all_gather_objects(read) for number in one) == [0, 1, 2, 3, 4]
    for _ in stepper.batches(loader):
        break
    assert model.running_mean.item() == own
