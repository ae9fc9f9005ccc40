"""Samplers and batch samplers of the program's own, which the ranks share."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from distman import DistmanError, DistributedManager
from distman.collectives import all_gather_objects
from distman.data import distributed_loader
from distman.handler import NNHandler
from distman.testing import ranks

LENGTHS = torch.randint(1, 9, (37,), generator=torch.Generator().manual_seed(0)).tolist()


def numbers(size):
    return TensorDataset(torch.arange(size))


class Buckets:
    """Batches of samples of like length, in a random order: at most so many steps of time in each."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return len(self.batches())

    def batches(self):
        found, batch = [], []
        for index in sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__):
            if batch and (len(batch) + 1) * LENGTHS[index] > 20:
                found.append(batch)
                batch = []
            batch.append(index)
        return [*found, batch]

    def __iter__(self):
        batches = self.batches()
        self.generator.shuffle(batches)
        return iter(batches)


SAMPLERS = {
    "a list": lambda: [5, 3, 3, 11, 0, 7, 2],
    "the global generator": lambda: RandomSampler(range(23)),
    "its own generator": lambda: WeightedRandomSampler([1.0, 5.0] * 6, 17, generator=torch.Generator()),
}
BATCH_SAMPLERS = {
    "lists": lambda: [[1, 2], [7], [0, 3, 5], [4, 4]],
    "Python": lambda: Buckets(random.Random(DistributedManager().rank)),  # noqa: S311 - an order
    "the global one of Python": lambda: Buckets(random),
    "NumPy": lambda: Buckets(np.random.default_rng()),
    "NumPy of old": lambda: Buckets(np.random.RandomState()),
    "torch's": lambda: BatchSampler(RandomSampler(range(29), generator=torch.Generator()), 3, drop_last=False),
}


def draws(loader):
    """Return what all ranks draw of an epoch: by step, by rank, without what has weight 0."""
    own = [(batch.tolist()[: loader.num_own], loader.num_total) for (batch,) in loader]
    steps = [*zip(*all_gather_objects(own), strict=True)]
    for step in steps:
        assert {total for _, total in step} == {sum(len(batch) for batch, _ in step)}
    return [[batch for batch, _ in step] for step in steps]


@ranks(1, 3)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_ranks_share_what_a_sampler_draws(kind, world_size):
    loader = distributed_loader(numbers(40), batch_size=2, sampler=SAMPLERS[kind](), seed=4)
    before = torch.get_rng_state(), random.getstate()
    epochs = [draws(loader) for _ in range(2)]
    assert (torch.equal(torch.get_rng_state(), before[0]), random.getstate()) == (True, before[1])
    drawn = [list(itertools.chain(*itertools.chain(*epoch))) for epoch in epochs]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    assert all(len(epoch) == len(SAMPLERS[kind]()) for epoch in drawn)
    assert (drawn[0] == drawn[1] == SAMPLERS[kind]()) == (kind == "a list")
    again = distributed_loader(numbers(40), batch_size=2, sampler=SAMPLERS[kind](), seed=4)
    again.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 2 * world_size})
    assert draws(again) == epochs[1][1:]


@ranks(1, 3)
@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
def test_the_ranks_take_turns_with_a_batch_sampler(kind, world_size):
    loader = distributed_loader(numbers(40), batch_sampler=BATCH_SAMPLERS[kind](), seed=2)
    epochs = [draws(loader) for _ in range(2)]
    batches = [[batch for step in epoch for batch in step if batch] for epoch in epochs]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    assert len(loader) == -(-len(BATCH_SAMPLERS[kind]()) // world_size)
    assert (batches[0] == batches[1]) == (kind == "lists")
    for epoch in batches:
        assert len(epoch) == len(BATCH_SAMPLERS[kind]())
        if isinstance(BATCH_SAMPLERS[kind](), Buckets):
            assert sorted(epoch) == sorted(Buckets(random).batches())
    again = distributed_loader(numbers(40), batch_sampler=BATCH_SAMPLERS[kind](), seed=2)
    again.load_state_dict({**loader.state_dict(), "epoch": 1, "position": world_size})
    assert draws(again) == epochs[1][1:]


def padded(samples):
    inputs, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack(targets)


@ranks(1, 3)
def test_a_training_by_buckets_is_that_of_one_process():
    data = [(torch.randn(length, dtype=torch.float64), torch.ones((), dtype=torch.float64)) for length in LENGTHS]
    data = all_gather_objects(data)[0]

    def forward(model, batch):
        return model(batch[0].sum(1, keepdim=True))[:, 0], batch[1]

    def make_model():
        torch.manual_seed(0)
        return nn.Linear(1, 1, dtype=torch.float64)

    handler = NNHandler(make_model, seed=0)
    handler.set_optimizer(torch.optim.SGD, lr=0.01)
    handler.set_loss_fn(nn.functional.mse_loss, forward=forward)
    handler.set_train_loader(data, batch_sampler=Buckets(random), collate_fn=padded)
    handler.train(2)

    batches = distributed_loader(data, batch_sampler=Buckets(random), seed=0).batches
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        counted = zip(batches.parts(epoch), batches.counts(epoch), strict=True)
        own = [part.tolist()[:number] for part, (number, _) in counted]
        for step in zip(*all_gather_objects(own), strict=True):
            taken = itertools.chain(*step)
            outputs, targets = forward(model, padded([data[index] for index in taken]))
            optimizer.zero_grad()
            nn.functional.mse_loss(outputs, targets).backward()
            optimizer.step()
    torch.testing.assert_close(handler.module.weight, model.weight, rtol=1e-12, atol=0)


@ranks(2)
def test_samplers_that_draw_differently_are_found(rank):
    for options in ({"sampler": [rank, 1, 2], "batch_size": 1}, {"batch_sampler": [[0, 1], [2 + rank]]}):
        handler = NNHandler(nn.Linear, in_features=1, out_features=1)
        handler.set_optimizer(torch.optim.SGD, lr=0.1)
        handler.set_loss_fn(nn.functional.mse_loss)
        handler.set_train_loader(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), **options)
        with pytest.raises(DistmanError, match="samplers of all ranks must draw the same, which differs in epoch 0"):
            handler.train(1)


class Endless:
    def __iter__(self):
        return itertools.count()


class Liar:
    def __len__(self):
        return 5

    def __iter__(self):
        return iter([1, 2, 3])


@ranks(1)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sampler": [0], "shuffle": False}, "shuffle must be left out beside sampler"),
        ({"sampler": [0], "batch_sampler": [[0]]}, "must be left out beside"),
        ({"batch_sampler": [[0]], "batch_size": 4}, "batch_size must be left out beside batch_sampler"),
        ({"batch_sampler": [[0]], "drop_last": True}, "drop_last must be left out beside batch_sampler"),
        ({"batch_sampler": [[0]], "evaluation": True}, "batch_sampler must be left out for evaluation"),
        ({"sampler": [0], "evaluation": True}, "sampler must be left out for evaluation"),
        ({"sampler": Endless()}, "sampler must be iterable in each epoch and have a length"),
        ({"sampler": iter([1])}, "sampler must be iterable in each epoch"),
        ({"sampler": 7}, "sampler must be iterable in each epoch"),
        ({"sampler": DistributedSampler(numbers(3), 2, 0)}, "sampler must yield the samples of all ranks"),
        ({"batch_sampler": BatchSampler(DistributedSampler(numbers(3), 2, 0), 2, drop_last=False)}, "of all ranks"),
    ],
)
def test_samplers_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(TypeError, match=complaint):
        distributed_loader(numbers(3), **options)


@ranks(1)
def test_samplers_that_yield_nothing_or_something_else_are_refused():
    with pytest.raises(ValueError, match="the length of sampler must be at least 1, got 0"):
        distributed_loader(numbers(3), sampler=[])
    with pytest.raises(ValueError, match="sampler must yield as many as its length says, 5, got 3 in epoch 0"):
        next(iter(distributed_loader(numbers(3), sampler=Liar())))
    with pytest.raises(ValueError, match="batch_sampler must yield batches with samples, got an empty one"):
        next(iter(distributed_loader(numbers(3), batch_sampler=[[0], []])))
