import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from distman import DistributedManager, Stepper
from distman.data import distributed_loader
from distman.handler import Callback, NNHandler
from distman.testing import ranks

from .problems import Network, assert_same_on_all_ranks, make_handler, reference, regression


class Stream:
    """Batches that each rank finds in its own way: 3 on rank 0, 4 on rank 1, none on the others."""

    def __init__(self, rank):
        inputs, targets = regression().tensors
        self.batches = [
            [(inputs[:16], targets[:16]), (inputs[16:32], targets[16:32]), (inputs[32:37], targets[32:37])],
            [(inputs[start : start + 7], targets[start : start + 7]) for start in range(37, 65, 7)],
            [],
        ][min(rank, 2)]

    def __iter__(self):
        return iter(self.batches)


@ranks(2, 3)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_with_other_numbers_of_batches_lose_no_sample(accumulate, rank):
    handler = make_handler(1)
    handler.set_train_loader(Stream(rank))
    history = handler.train(2, accumulate=accumulate)
    assert handler.num_steps == 2 * -(-4 // accumulate)
    inputs, targets = regression().tensors
    fresh = make_handler(1)
    steps = [
        torch.cat([torch.arange(0, 16), torch.arange(37, 44)]),
        torch.cat([torch.arange(16, 32), torch.arange(44, 51)]),
        torch.cat([torch.arange(32, 37), torch.arange(51, 58)]),
        torch.arange(58, 65),
    ]
    windows = [torch.cat(steps[start : start + accumulate]) for start in range(0, 4, accumulate)]
    expected = []
    for _ in range(2):
        total = 0.0
        for window in windows:
            loss = nn.functional.mse_loss(fresh.module(inputs[window]), targets[window])
            fresh.optimizer.zero_grad()
            loss.backward()
            fresh.optimizer.step()
            total += loss.item() * len(window)
        expected.append(total / 65)
    assert history["loss"] == pytest.approx(expected, rel=1e-10)
    assert_same_on_all_ranks(handler.module)


PARTS = [range(37), range(37, 65), range(0)]
"""What ranks 0, 1 and 2 read: the last one has no batch at all."""


def collate_as_torch_does(samples):
    return torch.utils.data.default_collate(samples)


class NumbersOfExchanges(Callback):
    """Notes after each step how many messages of the package the ranks have exchanged."""

    def __init__(self):
        self.numbers = []

    def on_step_end(self, handler, step):
        self.numbers.append(next(DistributedManager().resolve_group(None).exchanges))


@ranks(1, 3)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_loaders_of_known_lengths_train_as_others_without_a_message_per_step(drop_last, accumulate, rank, world_size):
    histories, numbers = [], []
    for collate_fn in (None, collate_as_torch_does):
        handler = make_handler(1)
        data = Subset(regression(), PARTS[rank])
        loader = DataLoader(
            data, batch_size=5, sampler=SequentialSampler(data), drop_last=drop_last, collate_fn=collate_fn
        )
        handler.set_train_loader(loader)
        exchanges = NumbersOfExchanges()
        handler.add_callback(exchanges)
        histories.append(handler.train(3, accumulate=accumulate)["loss"])
        assert handler.num_steps == 3 * -(-(7 if drop_last else 8) // accumulate)
        assert_same_on_all_ranks(handler.module)
        numbers.append([after - before for before, after in itertools.pairwise(exchanges.numbers)])
    assert histories[0] == histories[1]
    if world_size > 1:
        num_within = handler.num_steps // 3 - 1
        assert set(numbers[0][:num_within]) == {1}  # that of the callback itself
        assert min(numbers[1]) > 1


class OddSampler(RandomSampler):
    """Draws less than it says."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), 20)


class Told(DistributedSampler):
    """Keeps the epochs that it is told of."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.epochs = []

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.epochs.append(epoch)


class Buckets(Told):
    """A batch sampler that draws by itself."""

    def __iter__(self):
        return iter(torch.tensor([*super().__iter__()]).split(4))

    def __len__(self):
        return -(-self.num_samples // 4)


@ranks(2)
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "sampler in a batch_sampler"])
def test_whatever_draws_is_told_of_each_epoch_once(kind, rank, world_size):
    data = regression()
    sampler = (Buckets if kind == "batch_sampler" else Told)(data, world_size, rank, seed=1)
    drawn = {
        "sampler": {"sampler": sampler, "batch_size": 4},
        "batch_sampler": {"batch_sampler": sampler},
        "sampler in a batch_sampler": {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)},
    }
    handler, stepped, plain = make_handler(1), make_handler(1), make_handler(1)
    loader = DataLoader(data, **drawn[kind])
    handler.set_train_loader(loader)
    handler.train(3)
    stepper = Stepper(stepped.module, stepped.optimizer)
    for _ in range(3):
        for inputs, targets in stepper.batches(loader):
            stepper.backward(nn.functional.mse_loss(stepped(inputs), targets))
            stepper.step()
    assert sampler.epochs == [0, 1, 2] * 2
    plain.set_train_loader(DataLoader(data, 4, sampler=DistributedSampler(data, world_size, rank, seed=1)))
    plain.train(3)
    for one in (handler, stepped):
        torch.testing.assert_close(one.module.state_dict(), plain.module.state_dict(), rtol=1e-10, atol=0)


@ranks(2)
@pytest.mark.parametrize("is_batch_sampler", [False, True])
def test_what_samplers_of_the_program_say_of_their_lengths_is_not_relied_on(is_batch_sampler, rank):
    data = regression()
    sampler = OddSampler(data) if rank else RandomSampler(data)
    batches = (
        {"batch_sampler": BatchSampler(sampler, 8, drop_last=False)}
        if is_batch_sampler
        else {"sampler": sampler, "batch_size": 8}
    )
    handler = make_handler(1)
    handler.set_train_loader(DataLoader(data, **batches))
    handler.train(2)
    assert handler.num_steps == 2 * 9


class Thinned(Dataset):
    """Returns fewer samples than it was asked for, but in its first batch."""

    def __len__(self):
        return 16

    def __getitems__(self, indices):
        samples = [regression()[index] for index in indices]
        return samples if 0 in indices else samples[1:]


@ranks(1, 2)
def test_a_batch_of_another_length_is_refused_unless_the_program_collates():
    handler = make_handler(1)
    handler.set_train_loader(DataLoader(Thinned(), batch_size=4))
    with pytest.raises(ValueError, match=r"has drawn, 4, got 3 in batch 1 of epoch 0\. Pass the loader a collate_fn"):
        handler.train(1)
    handler.set_train_loader(DataLoader(Thinned(), batch_size=4, collate_fn=collate_as_torch_does))
    handler.train(1)
    assert handler.num_steps == 1 + 4  # these are other data, which are read from their beginning


@ranks(1, 2)
@pytest.mark.parametrize("cached", [False, True])
def test_fewer_samples_than_ranks_and_batches_of_any_structure(cached):
    data = [{"x": torch.ones(4, dtype=torch.float64), "y": 2.0}]
    handler = NNHandler(Network, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.1)
    handler.set_loss_fn(
        lambda outputs, targets: (outputs[:, 0] - targets).square().mean(),
        forward=lambda model, batch: (model(batch["x"]), batch["y"]),
    )
    handler.set_train_loader(data, batch_size=4, cached=cached)
    handler.set_val_loader(data, batch_size=4, cached=cached)
    handler.train(30)
    assert handler.history["val_loss"][-1] < 1e-3
    assert_same_on_all_ranks(handler.module)
    assert float(handler.predict(data, batch_size=1, all_ranks=True)) == pytest.approx(2.0, abs=0.05)


class GoesThrough(Callback):
    def __init__(self, loader):
        self.loader = loader

    def on_epoch_end(self, handler, record):
        assert len(list(self.loader)) == 5


@ranks(2)
def test_the_program_may_go_through_the_loader_meanwhile():
    handler = make_handler(8)
    loader = distributed_loader(regression(), batch_size=8, seed=1)
    handler.set_train_loader(loader)
    handler.add_callback(GoesThrough(loader))
    assert handler.train(3)["loss"] == pytest.approx(reference(3)[0], rel=1e-10)


class Endless(IterableDataset):
    def __init__(self, *, has_length):
        self.has_length = has_length

    def __iter__(self):
        return iter(zip(*regression().tensors, strict=True))

    def __len__(self):
        if not self.has_length:
            raise NotImplementedError
        return len(regression())


@ranks(1)
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("progress", [False, True])
def test_a_loader_of_a_stream_trains(has_length, progress):
    handler = make_handler(1)
    handler.set_train_loader(DataLoader(Endless(has_length=has_length), batch_size=16))
    handler.set_val_loader(DataLoader(Endless(has_length=has_length), batch_size=16))
    handler.train(2, progress=progress)
    assert handler.num_steps == 2 * 5
    assert handler.validate()["loss"] == pytest.approx(handler.history["val_loss"][-1])


@ranks(1)
def test_a_stream_itself_is_refused_with_what_to_write_instead():
    with pytest.raises(
        TypeError, match=r"by DataLoader\(distributed_stream\(dataset\), batch_size=32\), or batch_size=None"
    ):
        make_handler(1, data=Endless(has_length=False))


LENGTHS = [1, 4, 2, 5, 3, 1, 6, 2, 4, 1, 3, 2]


def by_time(samples):
    """Sequences of any lengths as a batch, whose first dim is the time."""
    return {
        "inputs": nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples]),
        "targets": nn.utils.rnn.pad_sequence([targets for _, targets in samples]),
        "is_there": nn.utils.rnn.pad_sequence([torch.ones(len(inputs)) for inputs, _ in samples]),
    }


def token_loss(outputs, batch):
    errors = (outputs - batch["targets"]).square()[..., 0] * batch["is_there"]
    return errors.sum() / batch["is_there"].sum()


def count_tokens(batch):
    return int(batch["is_there"].sum())


@ranks(1, 2, 3)
@pytest.mark.parametrize("is_own_loader", [False, True])
def test_losses_per_token_are_those_of_one_process(is_own_loader, rank, world_size):
    inputs, targets = regression(num_samples=sum(LENGTHS)).tensors
    sequences = list(zip(inputs.split(LENGTHS), targets.split(LENGTHS), strict=True))
    handler = make_handler(1, data=sequences)
    handler.set_loss_fn(
        token_loss, forward=lambda model, batch: (model(batch["inputs"]), batch), num_samples=count_tokens
    )
    for set_loader in (handler.set_train_loader, handler.set_val_loader):
        if is_own_loader:
            set_loader(DataLoader(sequences[rank::world_size], batch_size=12, collate_fn=by_time))
        else:
            set_loader(sequences, batch_size=12 // world_size, collate_fn=by_time)
    fresh = make_handler(1)
    expected = []
    for _ in range(3):
        loss = nn.functional.mse_loss(fresh.module(inputs), targets)
        expected.append(loss.item())
        fresh.optimizer.zero_grad()
        loss.backward()
        fresh.optimizer.step()
    history = handler.train(2)
    assert history["loss"] == pytest.approx(expected[:2], rel=1e-10)
    assert history["val_loss"] == pytest.approx(expected[1:], rel=1e-10)


@ranks(1)
@pytest.mark.parametrize(("number", "error"), [(2.5, TypeError), (None, TypeError), (-1, ValueError)])
def test_a_number_of_samples_is_whole(number, error):
    handler = make_handler(8)
    handler.set_loss_fn(nn.functional.mse_loss, num_samples=lambda _: number)
    with pytest.raises(error, match=f"num_samples must return .*, got {number}"):
        handler.train(1)
